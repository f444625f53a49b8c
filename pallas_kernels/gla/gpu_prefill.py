"""Prefill of gated linear attention on GPUs: chunks, in a Triton kernel.

With a decay per key channel another kernel goes first, `gpu_decay`'s. Letters as in `gpu_chunks`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import gpu_chunks, gpu_decay
from pallas_kernels.gpu_chunks import Chunk, Decay
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
        tokens: q, k [T, Hk, dk], v [T, Hv, dv], g f32[T, Hv] or [T, Hv, dk].
        out: [T, Hv, dv] with the output of the decode rows.
        state: f32[slots, Hv, dk, dv].
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        scale: factor on q.
        interpret: as in `pl.pallas_call`.

    Returns:
        `out` with the output of the prefill rows and 0 for padding tokens, and `state` with their
        last states, both updated in place.
    """
    q, k, v, g = tokens
    body, operands, chunk = _chunk, tokens, None
    if g.ndim == 3:
        chunk = gpu_chunks.CHUNK
        decayed = gpu_decay.decayed((q,), k, g, ragged, chunk, interpret)
        operands = v, *decayed.scores, *decayed.grown, decayed.rest, decayed.whole
        body = _channel_chunk
    return gpu_chunks.prefill(
        functools.partial(body, scale=scale), operands, out, state, ragged, slots,
        name="gla_prefill", chunk=chunk, interpret=interpret,
    )  # fmt: skip


def _chunk(
    chunk: Chunk, column: jax.Array, old: jax.Array, q: Any, k: Any, v: Any, g: Any, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Some columns of one chunk."""
    queries, keys, values = chunk.keys(q), chunk.keys(k), chunk.values(v, column)
    total = jnp.cumsum(chunk.gates(g))
    scores = gpu_chunks.head_scores(queries, keys, total)
    out, new = gpu_chunks.advance(old, queries, keys, values, scores, Decay.of(total))
    return scale * out, new


def _channel_chunk(
    chunk: Chunk, column: jax.Array, old: jax.Array, v: Any, scores: Any, queries: Any, keys: Any,
    whole: Any, *, scale: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Some columns of one chunk, with a decay per key channel."""
    out, new = gpu_chunks.advance(
        old, chunk.keys(queries), chunk.keys(keys), chunk.values(v, column), chunk.keys(scores),
        gpu_decay.decay_of(chunk, whole),
    )  # fmt: skip
    return scale * out, new
