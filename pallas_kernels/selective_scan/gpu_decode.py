"""Decode of Mamba-1's scan on GPUs: a Triton kernel that moves every state once, in place.

A program has some channels, with their states, for one row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import gpu_chip, gpu_rows
from pallas_kernels.gpu_rows import F32, Row, Slots
from pallas_kernels.ragged import RaggedBatch


def decode(
    x: jax.Array,
    dt: jax.Array,
    B: jax.Array,
    C: jax.Array,
    A: jax.Array,
    D: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The decode rows of a batch.

    Args:
        x: [S, E]. dt: f32[S, E] step sizes. B, C: [S, N]. A: f32[N, E]. D: f32[E].
        state: f32[slots, N, E], updated in place if it is donated.
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        interpret: as in `pl.pallas_call`.

    Returns:
        y [S, E], 0 for padding rows, and the new `state`.
    """
    size, channels = A.shape
    columns = gpu_chip.state_columns("selective_scan", size, channels)
    return gpu_rows.decode(
        functools.partial(_row, columns=columns), (x, dt, B, C, A, D), state, ragged, slots,
        name="selective_scan_decode", grid=(pl.cdiv(channels, columns),),
        out=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret,
    )  # fmt: skip


def _row(
    row: Row, x: Any, dt: Any, B: Any, C: Any, A: Any, D: Any, before: Any, y: Any, after: Any, *,
    columns: int,
) -> None:  # fmt: skip
    """`columns` channels, for one row."""
    size, channels = A.shape
    index = jnp.arange(gpu_chip.power_of_two(size))
    column = pl.program_id(0) * columns + jnp.arange(columns)
    real_index, real_column = index < size, column < channels
    place, tile = (index[:, None], column[None]), real_index[:, None] & real_column[None]

    x_row, step = (
        plgpu.load(ref.at[row.number, column], mask=real_column, other=0.0).astype(F32)
        for ref in (x, dt)
    )
    B_row, C_row = (
        plgpu.load(ref.at[row.number, index], mask=real_index, other=0.0).astype(F32)
        for ref in (B, C)
    )
    decay = jnp.exp(step[None] * plgpu.load(A.at[place], mask=tile, other=0.0))
    written = step * x_row
    old = decay * row.read(before, place, tile)
    row.write(after, place, tile, old + B_row[:, None] * written[None])
    out = jnp.sum(old * C_row[:, None], axis=0) + jnp.sum(B_row * C_row) * written
    skip = plgpu.load(D.at[column], mask=real_column, other=0.0)
    row.finish(y, (column,), real_column, out + skip * x_row)
