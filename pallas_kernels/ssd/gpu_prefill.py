"""Prefill of Mamba-2's recurrence on GPUs: chunks, in a Triton kernel."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import gpu_chunks
from pallas_kernels.gpu_chunks import Chunk, Decay
from pallas_kernels.gpu_rows import Slots
from pallas_kernels.ragged import RaggedBatch


def prefill(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None,
    y: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The prefill rows of a batch.

    Args:
        x: [T, H, P]. dt: f32[T, H] step sizes. A: f32[H]. B, C: [T, G, N]. D: f32[H] or None.
        y: [T, H, P] with the output of the decode rows.
        state: f32[slots, N, H * P].
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        interpret: as in `pl.pallas_call`.

    Returns:
        `y` with the output of the prefill rows and 0 for padding tokens, and `state` with their
        last states, both updated in place.
    """
    weights = (A,) if D is None else (A, D)
    return gpu_chunks.prefill(
        _chunk, (x, dt, B, C, *weights), y, state, ragged, slots,
        name="ssd_prefill", interpret=interpret,
    )  # fmt: skip


def _chunk(
    chunk: Chunk, column: jax.Array, old: jax.Array, x: Any, dt: Any, B: Any, C: Any, A: Any,
    *skip: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Some channels of one chunk. skip: D if there is one."""
    inputs, step = chunk.values(x, column), chunk.gates(dt)
    values, total = step[:, None] * inputs, jnp.cumsum(step * A[chunk.head])
    queries, keys = chunk.keys(C), chunk.keys(B)
    scores = gpu_chunks.head_scores(queries, keys, total)
    out, new = gpu_chunks.advance(old, queries, keys, values, scores, Decay.of(total))
    return (out + skip[0][chunk.head] * inputs if skip else out), new
