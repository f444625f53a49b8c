"""Decode of the gated delta rule on GPUs: a Triton kernel that moves every state once, in place.

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


def decode(
    tokens: tuple[jax.Array, ...],
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    scale: float,
    l2norm: bool,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The decode rows of a batch.

    Args:
        tokens: q, k [S, Hk, dk], v [S, Hv, dv], g [S, Hv] or [S, Hv, dk], beta [S, Hv].
        state: [slots, Hv, dk, dv], updated in place if it is donated.
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        scale: factor on q.
        l2norm: normalise q and k.
        interpret: as in `pl.pallas_call`.

    Returns:
        out [S, Hv, dv], 0 for padding rows, and the new `state`.
    """
    v = tokens[2]
    _, heads, dk, dv = state.shape
    columns = gpu_chip.state_columns("gated_delta_rule", dk, dv)
    return gpu_rows.decode(
        functools.partial(_row, columns=columns, scale=scale, l2norm=l2norm), tokens, state, ragged,
        slots, name="gated_delta_decode", grid=(pl.cdiv(dv, columns), heads),
        out=jax.ShapeDtypeStruct(v.shape, v.dtype), interpret=interpret,
    )  # fmt: skip


def _row(
    row: Row, q: Any, k: Any, v: Any, g: Any, beta: Any, before: Any, out: Any, after: Any, *,
    columns: int, scale: float, l2norm: bool,
) -> None:  # fmt: skip
    """`columns` columns of one head's state, for one row."""
    part, head = pl.program_id(0), pl.program_id(1)
    _, heads, dk, dv = before.shape
    key_head = lax.div(head, heads // k.shape[1])
    channel = jnp.arange(gpu_chip.power_of_two(dk))
    column = part * columns + jnp.arange(columns)
    real_channel, real_column = channel < dk, column < dv
    place, tile = (head, channel[:, None], column[None]), real_channel[:, None] & real_column[None]

    def key(ref: Any) -> jax.Array:
        x = plgpu.load(ref.at[row.number, key_head, channel], mask=real_channel, other=0.0)
        x = x.astype(F32)
        return x * lax.rsqrt(jnp.sum(x * x) + 1e-6) if l2norm else x

    q_row, k_row = key(q) * scale, key(k)
    if len(g.shape) == 3:
        log_decay = plgpu.load(g.at[row.number, head, channel], mask=real_channel, other=0.0)
    else:
        log_decay = jnp.full(channel.shape, g[row.number, head])
    old = jnp.exp(log_decay)[:, None] * row.read(before, place, tile).astype(F32)
    # As in the reference the output comes from the old state, so both sums go over it at once.
    old_k, old_q = (jnp.sum(old * x[:, None], axis=0) for x in (k_row, q_row))
    v_row = plgpu.load(v.at[row.number, head, column], mask=real_column, other=0.0).astype(F32)
    delta = beta[row.number, head] * (v_row - old_k)
    row.write(after, place, tile, old + k_row[:, None] * delta[None])
    row.finish(out, (head, column), real_column, old_q + jnp.sum(q_row * k_row) * delta)
