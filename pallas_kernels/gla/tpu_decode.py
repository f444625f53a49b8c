"""Decode on TPU: one token per row, one transfer of each state in and one out.

Rows are computed on the vector units in float32: values lie along the lanes, so that values, a
decay per head and the output are rows, keys, queries and decays per channel are columns, and a sum
over dk goes over whole vectors. Mamba-2's recurrence (`ssd`) runs through it, too.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tpu_rows
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_chip import LANES
from pallas_kernels.tpu_rows import F32, Slots


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    name: str,
    heads: int,
    vmem_limit: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Decode rows of a batch; other rows touch no slot.

    Args:
        q: [S, Hk, dk] scaled queries of the first S tokens.
        k: [S, Hk, dk] keys.
        v: f32[S, Hv, dv] values.
        g: f32[S, Hv] or f32[S, Hv, dk] log decay.
        state: f32[slots, Hv, dk, dv] or f32[slots, dk, Hv * dv].
        ragged: row boundaries.
        slots: the slots to read and to write, i32[S] each.
        name: of the kernel.
        heads: value heads per grid step, see `tpu_chip.decode_heads`.
        vmem_limit: bytes of VMEM that the kernel may use.
        interpret: as for `pl.pallas_call`.

    Returns:
        out f32[S, Hv, dv], 0 for rows that do not decode, and the new `state`.
    """
    rows, v_heads, dv = v.shape
    k_heads, dk = k.shape[1:]
    blocks = v_heads // heads
    parts = min(blocks, k_heads)
    # What goes as columns, of the heads of a block side by side.
    columns = [x.astype(F32).reshape(rows, parts, -1, dk) for x in (q, k)]
    tokens = [v.reshape(rows, -1)]
    if g.ndim == 3:
        columns.append(jnp.exp(g).reshape(rows, blocks, heads, dk))
        columns = [jnp.repeat(x, blocks // x.shape[1], axis=1) for x in columns]
    else:
        tokens.append(jnp.broadcast_to(jnp.exp(g)[:, :, None], v.shape).reshape(rows, -1))
    stacked = jnp.concatenate(columns, axis=2).swapaxes(0, 1)
    out, state = tpu_rows.decode(
        functools.partial(_row, k_heads=k_heads // parts, heads=heads), tokens, stacked, [], state,
        ragged, slots, name=name, lanes=heads * dv, vmem_limit=vmem_limit, interpret=interpret,
    )  # fmt: skip
    return out.reshape(v.shape), state


def _row(from_zeros: jax.Array, values, *refs, k_heads: int, heads: int) -> None:
    """One row, for one block of heads.

    VMEM, all float32: values, decays per head if any, and out [1, 1, Hv' dv]; columns [1, 1, n, dk]
    of queries, keys and decays per channel if any; before, after [1, Hv', dk, dv] or
    [1, dk, Hv' dv].
    """
    *decays, columns, before, out, after = refs
    dk, lanes = columns.shape[3], values.shape[2]
    turned = columns[0, 0].T  # [dk, n]

    def vector(at: int) -> tuple[int | slice, ...]:
        """Where the state's lanes [at, at + 128) are."""
        if before.ndim == 3:
            return 0, slice(None), slice(at, at + LANES)
        head, first = divmod(at, before.shape[3])
        return 0, head, slice(None), slice(first, first + LANES)

    @functools.cache
    def column(n: int) -> jax.Array:
        return jnp.broadcast_to(turned[:, n : n + 1], (dk, LANES))

    for at in range(0, lanes, LANES):
        part = slice(at, at + LANES)
        key_head, head = at * k_heads // lanes, at * heads // lanes
        q, k = column(key_head), column(k_heads + key_head)
        decay = decays[0][0, :, part] if decays else column(2 * k_heads + head)
        # Selected, since the slot may hold anything.
        old = jnp.where(from_zeros, 0.0, before[vector(at)])
        state = old * decay + k * values[0, :, part]
        after[vector(at)] = state
        out[0, :, part] = jnp.sum(state * q, axis=0, keepdims=True)
