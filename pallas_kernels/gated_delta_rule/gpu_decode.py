"""Decode of the gated delta rule on GPUs: a Triton kernel that moves every state once, in place.

A program has some columns of one head's state, for one row. It reads them from one slot and writes
them to another or the same one, and nobody else touches them.
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
    tokens: tuple[jax.Array, ...],
    state: jax.Array,
    ragged: RaggedBatch,
    slots: tuple[jax.Array, jax.Array],
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
    operands = (*tokens, ragged.seq_lens, ragged.counts, *slots, state)
    out, state = pl.pallas_call(
        functools.partial(_kernel, columns=columns, scale=scale, l2norm=l2norm),
        grid=(pl.cdiv(dv, columns), heads, v.shape[0]),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v, state)),
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gated_delta_decode",
    )(*operands)
    return out, state


def _kernel(
    q: Any, k: Any, v: Any, g: Any, beta: Any, seq_lens: Any, counts: Any, sources: Any,
    targets: Any, before: Any, out: Any, after: Any, *, columns: int, scale: float, l2norm: bool,
) -> None:  # fmt: skip
    """`columns` columns of one head's state, for one row."""
    part, head, row = (pl.program_id(axis) for axis in range(3))
    _, heads, dk, dv = before.shape
    key_head = lax.div(head, heads // k.shape[1])
    channel = jnp.arange(gpu_chip.power_of_two(dk))
    column = part * columns + jnp.arange(columns)
    real_channel, real_column = channel < dk, column < dv
    tile = real_channel[:, None] & real_column[None]
    decodes = row < counts[0]

    def key(ref: Any) -> jax.Array:
        x = plgpu.load(ref.at[row, key_head, channel], mask=real_channel, other=0.0).astype(F32)
        return x * lax.rsqrt(jnp.sum(x * x) + 1e-6) if l2norm else x

    q_row, k_row = key(q) * scale, key(k)
    v_row = plgpu.load(v.at[row, head, column], mask=real_column, other=0.0).astype(F32)
    if len(g.shape) == 3:
        log_decay = plgpu.load(g.at[row, head, channel], mask=real_channel, other=0.0)
    else:
        log_decay = jnp.full(channel.shape, g[row, head])
    kept = jnp.exp(log_decay)[:, None]
    # Without earlier tokens nothing is read: the slot may hold anything.
    read = tile & decodes & (seq_lens[row] > 1)
    old = plgpu.load(
        before.at[sources[row], head, channel[:, None], column[None]], mask=read, other=0.0
    )
    old = kept * old.astype(F32)
    # As in the reference the output comes from the old state, so both sums go over it at once.
    old_k, old_q = (jnp.sum(old * x[:, None], axis=0) for x in (k_row, q_row))
    delta = beta[row, head] * (v_row - old_k)
    new = old + k_row[:, None] * delta[None]
    plgpu.store(
        after.at[targets[row], head, channel[:, None], column[None]],
        new.astype(after.dtype),
        mask=tile & decodes,
    )
    attended = jnp.where(decodes, old_q + jnp.sum(q_row * k_row) * delta, 0.0)
    plgpu.store(out.at[row, head, column], attended.astype(out.dtype), mask=real_column)
