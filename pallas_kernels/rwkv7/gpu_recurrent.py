"""RWKV-7's recurrence on GPUs, token by token: a Triton kernel moves every state once, in place.

A program has some columns of one head's state, for one row.
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
    tokens: tuple[jax.Array, ...],
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    prefill: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The decode rows of a batch, or all of them.

    Args:
        tokens: r, w, k [T, H, dk], v [T, H, dv], a, b [T, H, dk].
        state: f32[slots, dk, H * dv], updated in place if it is donated.
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        prefill: take the prefill rows, too, token by token.
        interpret: as in `pl.pallas_call`.

    Returns:
        out [T, H, dv], 0 for padding where a row might be, and the new `state`.
    """
    v = tokens[3]
    _, heads, dv = v.shape
    columns = gpu_chip.state_columns("rwkv7", state.shape[1], dv)
    return gpu_rows.run(
        functools.partial(_row, columns=columns), tokens, state, ragged, slots,
        name="rwkv7", grid=(pl.cdiv(dv, columns), heads),
        out=jax.ShapeDtypeStruct(v.shape, v.dtype), prefill=prefill, interpret=interpret,
    )  # fmt: skip


def _row(
    row: Row, r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, before: Any, out: Any, after: Any, *,
    columns: int,
) -> None:  # fmt: skip
    """`columns` columns of one head's state, for one row."""
    part, head = pl.program_id(0), pl.program_id(1)
    dk, dv = r.shape[2], v.shape[2]
    channel = jnp.arange(gpu_chip.power_of_two(dk))
    column = part * columns + jnp.arange(columns)
    real_channel, real_column = channel < dk, column < dv
    place, tile = (
        (channel[:, None], head * dv + column[None]),
        real_channel[:, None] & real_column[None],
    )

    def token(i: jax.Array, old: jax.Array) -> jax.Array:
        r_i, w_i, k_i, a_i, b_i = (
            plgpu.load(ref.at[i, head, channel], mask=real_channel, other=0.0).astype(F32)
            for ref in (r, w, k, a, b)
        )
        v_i = plgpu.load(v.at[i, head, column], mask=real_column, other=0.0).astype(F32)
        kept = jnp.exp(w_i)
        # The output comes from the old state, so that both sums go over it at once.
        read, total = (jnp.sum(old * x[:, None], axis=0) for x in (a_i, kept * r_i))
        total += jnp.sum(r_i * b_i) * read + jnp.sum(r_i * k_i) * v_i
        row.finish(out, i, (head, column), real_column, total)
        return kept[:, None] * old + b_i[:, None] * read[None] + k_i[:, None] * v_i[None]

    row.walk(before, after, place, tile, token)
