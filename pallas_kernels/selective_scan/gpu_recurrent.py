"""Mamba-1's scan on GPUs, token by token: a Triton kernel moves every state once, in place.

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


def recurrent(
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
    prefill: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The decode rows of a batch, or all of them.

    Args:
        x: [T, E]. dt: f32[T, E] step sizes. B, C: [T, N]. A: f32[N, E]. D: f32[E].
        state: f32[slots, N, E], updated in place if it is donated.
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        prefill: take the prefill rows, too, token by token.
        interpret: as in `pl.pallas_call`.

    Returns:
        y [T, E], 0 for padding where a row might be, and the new `state`.
    """
    size, channels = A.shape
    columns = gpu_chip.state_columns("selective_scan", size, channels)
    return gpu_rows.run(
        functools.partial(_row, columns=columns), (x, dt, B, C, A, D), state, ragged, slots,
        name="selective_scan", grid=(pl.cdiv(channels, columns),),
        out=jax.ShapeDtypeStruct(x.shape, x.dtype), prefill=prefill, interpret=interpret,
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

    rates = plgpu.load(A.at[place], mask=tile, other=0.0)
    skip = plgpu.load(D.at[column], mask=real_column, other=0.0)

    def token(i: jax.Array, old: jax.Array) -> jax.Array:
        x_i, step = (
            plgpu.load(ref.at[i, column], mask=real_column, other=0.0).astype(F32)
            for ref in (x, dt)
        )
        B_i, C_i = (
            plgpu.load(ref.at[i, index], mask=real_index, other=0.0).astype(F32) for ref in (B, C)
        )
        written, old = step * x_i, jnp.exp(step[None] * rates) * old
        total = jnp.sum(old * C_i[:, None], axis=0) + jnp.sum(B_i * C_i) * written
        row.finish(y, i, (column,), real_column, total + skip * x_i)
        return old + B_i[:, None] * written[None]

    row.walk(before, after, place, tile, token)
