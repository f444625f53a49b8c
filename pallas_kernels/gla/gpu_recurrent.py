"""Gated linear attention on GPUs, token by token: a Triton kernel moves every state once, in place.

A program has some columns of one head's state, for one row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu_chip, gpu_rows
from pallas_kernels.gpu_rows import HeadColumns, Row, Slots
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
        tokens: q, k [T, Hk, dk], v [T, Hv, dv], g [T, Hv] or [T, Hv, dk].
        state: f32[slots, Hv, dk, dv], updated in place if it is donated.
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        scale: factor on q.
        prefill: take the prefill rows, too, token by token.
        interpret: as in `pl.pallas_call`.

    Returns:
        out [T, Hv, dv], 0 for padding where a row might be, and the new `state`.
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
    part = HeadColumns.of(k, before, columns)

    def token(i: jax.Array, old: jax.Array) -> jax.Array:
        query, key, value = part.key(q, i), part.key(k, i), part.value(v, i)
        old = part.decay(g, i) * old
        total = jnp.sum(old * query[:, None], axis=0) + jnp.sum(query * key) * value
        row.finish(out, i, (part.head, part.column), part.real_column, scale * total)
        return old + key[:, None] * value[None]

    row.walk(before, after, part.place, part.mask, token)
