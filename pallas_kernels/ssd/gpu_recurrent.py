"""Mamba-2's recurrence on GPUs, token by token: a Triton kernel moves every state once, in place.

A program has some channels of one head, with their state, for one row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import gpu_chip, gpu_rows
from pallas_kernels.gpu_rows import F32, Row, Slots
from pallas_kernels.ragged import RaggedBatch


def recurrent(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    prefill: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The decode rows of a batch, or all of them.

    Args:
        x: [T, H, P]. dt: f32[T, H] step sizes. A: f32[H]. B, C: [T, G, N]. D: f32[H] or None.
        state: f32[slots, N, H * P], updated in place if it is donated.
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        prefill: take the prefill rows, too, token by token.
        interpret: as in `pl.pallas_call`.

    Returns:
        y [T, H, P], 0 for padding where a row might be, and the new `state`.
    """
    _, heads, width = x.shape
    columns = gpu_chip.state_columns("ssd", state.shape[1], width)
    weights = (A,) if D is None else (A, D)
    return gpu_rows.run(
        functools.partial(_row, columns=columns), (x, dt, B, C, *weights), state, ragged, slots,
        name="ssd", grid=(pl.cdiv(width, columns), heads),
        out=jax.ShapeDtypeStruct(x.shape, x.dtype), prefill=prefill, interpret=interpret,
    )  # fmt: skip


def _row(row: Row, x: Any, dt: Any, B: Any, C: Any, A: Any, *refs: Any, columns: int) -> None:
    """`columns` channels of one head, for one row. refs: D if there is one, state, y, new state."""
    *skip, before, y, after = refs
    part, head = pl.program_id(0), pl.program_id(1)
    _, heads, width = x.shape
    _, groups, size = B.shape
    group = lax.div(head, heads // groups)
    index = jnp.arange(gpu_chip.power_of_two(size))
    column = part * columns + jnp.arange(columns)
    real_index, real_column = index < size, column < width
    place = (index[:, None], head * width + column[None])
    tile = real_index[:, None] & real_column[None]

    def token(i: jax.Array, old: jax.Array) -> jax.Array:
        x_i = plgpu.load(x.at[i, head, column], mask=real_column, other=0.0).astype(F32)
        B_i, C_i = (
            plgpu.load(ref.at[i, group, index], mask=real_index, other=0.0).astype(F32)
            for ref in (B, C)
        )
        step = dt[i, head]
        written, old = step * x_i, jnp.exp(step * A[head]) * old
        total = jnp.sum(old * C_i[:, None], axis=0) + jnp.sum(B_i * C_i) * written
        if skip:
            total += skip[0][head] * x_i
        row.finish(y, i, (head, column), real_column, total)
        return old + B_i[:, None] * written[None]

    row.walk(before, after, place, tile, token)
