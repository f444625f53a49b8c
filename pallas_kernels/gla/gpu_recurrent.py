"""Gated linear attention on GPUs, token by token: a Triton kernel moves every state once, in place.

A program has some columns of one head's state, for one row.
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
    tokens: tuple[jax.Array, ...],
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    scale: float,
    prefill: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The decode rows of a batch, or all of them.

    Args:
        tokens: q, k [S, Hk, dk], v [S, Hv, dv], g [S, Hv] or [S, Hv, dk].
        state: f32[slots, Hv, dk, dv], updated in place if it is donated.
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        scale: factor on q.
        prefill: take the prefill rows, too, token by token.
        interpret: as in `pl.pallas_call`.

    Returns:
        out [S, Hv, dv], 0 for padding rows, and the new `state`.
    """
    v = tokens[2]
    _, heads, dk, dv = state.shape
    columns = gpu_chip.state_columns("gla", dk, dv)
    return gpu_rows.run(
        functools.partial(_row, columns=columns, scale=scale), tokens, state, ragged, slots,
        name="gla", grid=(pl.cdiv(dv, columns), heads),
        out=jax.ShapeDtypeStruct(v.shape, v.dtype), prefill=prefill, interpret=interpret,
    )  # fmt: skip


def _row(
    row: Row, q: Any, k: Any, v: Any, g: Any, before: Any, out: Any, after: Any, *, columns: int,
    scale: float,
) -> None:  # fmt: skip
    """`columns` columns of one head's state, for one row."""
    part, head = pl.program_id(0), pl.program_id(1)
    _, heads, dk, dv = before.shape
    key_head = lax.div(head, heads // k.shape[1])
    channel = jnp.arange(gpu_chip.power_of_two(dk))
    column = part * columns + jnp.arange(columns)
    real_channel, real_column = channel < dk, column < dv
    place, tile = (head, channel[:, None], column[None]), real_channel[:, None] & real_column[None]

    def token(i: jax.Array, old: jax.Array) -> jax.Array:
        query, key = (
            plgpu.load(ref.at[i, key_head, channel], mask=real_channel, other=0.0).astype(F32)
            for ref in (q, k)
        )
        value = plgpu.load(v.at[i, head, column], mask=real_column, other=0.0).astype(F32)
        if len(g.shape) == 3:
            log_decay = plgpu.load(g.at[i, head, channel], mask=real_channel, other=0.0)
        else:
            log_decay = jnp.full(channel.shape, g[i, head])
        old = jnp.exp(log_decay)[:, None] * old
        total = jnp.sum(old * query[:, None], axis=0) + jnp.sum(query * key) * value
        row.finish(out, i, (head, column), real_column, scale * total)
        return old + key[:, None] * value[None]

    row.walk(before, after, place, tile, token)
