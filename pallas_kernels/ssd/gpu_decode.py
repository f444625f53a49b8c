"""Decode of Mamba-2's recurrence on GPUs: a Triton kernel that moves every state once, in place.

A program has some channels of one head, with their state, for one row. It reads the state from one
slot and writes it to another or the same one, and nobody else touches it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import gpu_chip
from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32


def decode(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: tuple[jax.Array, jax.Array],
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The decode rows of a batch.

    Args:
        x: [S, H, P]. dt: f32[S, H] step sizes. A: f32[H]. B, C: [S, G, N]. D: f32[H] or None.
        state: f32[slots, N, H * P], updated in place if it is donated.
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        interpret: as in `pl.pallas_call`.

    Returns:
        y [S, H, P], 0 for padding rows, and the new `state`.
    """
    rows, heads, width = x.shape
    columns = gpu_chip.state_columns("ssd", state.shape[1], width)
    weights = (A,) if D is None else (A, D)
    operands = (x, dt, B, C, ragged.seq_lens, ragged.counts, *slots, *weights, state)
    y, state = pl.pallas_call(
        functools.partial(_kernel, columns=columns),
        grid=(pl.cdiv(width, columns), heads, rows),
        out_shape=tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, state)),
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="ssd_decode",
    )(*operands)
    return y, state


def _kernel(
    x: Any, dt: Any, B: Any, C: Any, seq_lens: Any, counts: Any, sources: Any, targets: Any,
    A: Any, *refs: Any, columns: int,
) -> None:  # fmt: skip
    """`columns` channels of one head, for one row. refs: D if there is one, state, y, new state."""
    *skip, before, y, after = refs
    part, head, row = (pl.program_id(axis) for axis in range(3))
    _, heads, width = x.shape
    _, groups, size = B.shape
    group = lax.div(head, heads // groups)
    index = jnp.arange(gpu_chip.power_of_two(size))
    column = part * columns + jnp.arange(columns)
    real_index, real_column = index < size, column < width
    tile = real_index[:, None] & real_column[None]
    decodes = row < counts[0]

    x_row = plgpu.load(x.at[row, head, column], mask=real_column, other=0.0).astype(F32)
    B_row, C_row = (
        plgpu.load(ref.at[row, group, index], mask=real_index, other=0.0).astype(F32)
        for ref in (B, C)
    )
    step = dt[row, head]
    # Without earlier tokens nothing is read: the slot may hold anything.
    read = tile & decodes & (seq_lens[row] > 1)
    place = (index[:, None], head * width + column[None])
    old = jnp.exp(step * A[head]) * plgpu.load(
        before.at[sources[row], *place], mask=read, other=0.0
    )
    written = step * x_row
    new = old + B_row[:, None] * written[None]
    plgpu.store(after.at[targets[row], *place], new, mask=tile & decodes)
    out = jnp.sum(old * C_row[:, None], axis=0) + jnp.sum(B_row * C_row) * written
    if skip:
        out += skip[0][head] * x_row
    out = jnp.where(decodes, out, 0.0)
    plgpu.store(y.at[row, head, column], out.astype(y.dtype), mask=real_column)
