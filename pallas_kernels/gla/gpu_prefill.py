"""Prefill of gated linear attention with a decay per head on GPUs: chunks, in a Triton kernel."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import gpu_chunks
from pallas_kernels.gpu_chunks import Chunk
from pallas_kernels.gpu_rows import Slots
from pallas_kernels.ragged import RaggedBatch


def prefill(
    tokens: tuple[jax.Array, ...],
    out: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    scale: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The prefill rows of a batch.

    Args:
        tokens: q, k [T, Hk, dk], v [T, Hv, dv], g f32[T, Hv].
        out: [T, Hv, dv] with the output of the decode rows.
        state: f32[slots, Hv, dk, dv].
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        scale: factor on q.
        interpret: as in `pl.pallas_call`.

    Returns:
        `out` with the output of the prefill rows and 0 for padding tokens, and `state` with their
        last states, both updated in place.
    """
    return gpu_chunks.prefill(
        functools.partial(_chunk, scale=scale), tokens, out, state, ragged, slots,
        name="gla_prefill", interpret=interpret,
    )  # fmt: skip


def _chunk(
    chunk: Chunk, column: jax.Array, old: jax.Array, q: Any, k: Any, v: Any, g: Any, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Some columns of one chunk."""
    queries, keys, values = chunk.keys(q), chunk.keys(k), chunk.values(v, column)
    out, new = gpu_chunks.advance(old, queries, keys, values, jnp.cumsum(chunk.gates(g)))
    return scale * out, new
