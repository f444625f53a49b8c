"""The gated delta rule on GPUs, token by token: a Triton kernel moves every state once, in place.

A program has some columns of one head's state, for one row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
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
    l2norm: bool,
    prefill: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The decode rows of a batch, or all of them.

    Args:
        tokens: q, k [T, Hk, dk], v [T, Hv, dv], g [T, Hv] or [T, Hv, dk], beta [T, Hv].
        state: [slots, Hv, dk, dv], updated in place if it is donated.
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        scale: factor on q.
        l2norm: normalise q and k.
        prefill: take the prefill rows, too, token by token.
        interpret: as in `pl.pallas_call`.

    Returns:
        out [T, Hv, dv], 0 for padding where a row might be, and the new `state`.
    """
    v = tokens[2]
    _, heads, dk, dv = state.shape
    columns = gpu_chip.state_columns("gated_delta_rule", dk, dv)
    return gpu_rows.run(
        functools.partial(_row, columns=columns, scale=scale, l2norm=l2norm), tokens, state, ragged,
        slots, name="gated_delta", grid=(pl.cdiv(dv, columns), heads),
        out=jax.ShapeDtypeStruct(v.shape, v.dtype), prefill=prefill, interpret=interpret,
    )  # fmt: skip


def _row(
    row: Row, q: Any, k: Any, v: Any, g: Any, beta: Any, before: Any, out: Any, after: Any, *,
    columns: int, scale: float, l2norm: bool,
) -> None:  # fmt: skip
    """`columns` columns of one head's state, for one row."""
    part = HeadColumns.of(k, before, columns)

    def token(i: jax.Array, old: jax.Array) -> jax.Array:
        def key_of(ref: Any) -> jax.Array:
            x = part.key(ref, i)
            return x * lax.rsqrt(jnp.sum(x * x) + 1e-6) if l2norm else x

        query, key = key_of(q) * scale, key_of(k)
        old = part.decay(g, i) * old
        # As in the reference the output comes from the old state, so both sums go over it at once.
        old_k, old_q = (jnp.sum(old * x[:, None], axis=0) for x in (key, query))
        delta = beta[i, part.head] * (part.value(v, i) - old_k)
        total = old_q + jnp.sum(query * key) * delta
        row.finish(out, i, (part.head, part.column), part.real_column, total)
        return old + key[:, None] * delta[None]

    row.walk(before, after, part.place, part.mask, token)
