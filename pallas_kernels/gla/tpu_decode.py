"""Decode on TPU: one token per row, one transfer of each state in and one out.

The grid goes over (head blocks, rows). The pipeline fetches the state of row i + 1 from its read
slot while row i is computed and row i - 1 is on its way to its write slot. Rows are computed on
the vector units in float32: values lie along the lanes, so that values, a decay per head and the
output are rows, keys, queries and decays per channel are columns, and a sum over dk goes over whole
vectors. Mamba-2's recurrence (`ssd`) runs through it, too.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_chip import LANES
from pallas_kernels.tpu_rows import F32, Slots, decode_schedule


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
    blocks, lanes = v_heads // heads, heads * dv
    per_channel = g.ndim == 3
    parts = min(blocks, k_heads)
    # What goes as columns, of the heads of a block side by side.
    columns = [x.astype(F32).reshape(rows, parts, -1, dk) for x in (q, k)]
    values = [v.reshape(rows, 1, -1)]
    if per_channel:
        columns.append(jnp.exp(g).reshape(rows, blocks, heads, dk))
        columns = [jnp.repeat(x, blocks // x.shape[1], axis=1) for x in columns]
    else:
        decay = jnp.broadcast_to(jnp.exp(g)[:, :, None], v.shape)
        values.append(decay.reshape(rows, 1, -1))
    stacked = jnp.concatenate(columns, axis=2).swapaxes(0, 1)
    share = blocks // stacked.shape[0]  # blocks with the same keys
    row = pl.BlockSpec((1, 1, lanes), lambda j, i, *_: (i, 0, j))

    def slot(which: int) -> pl.BlockSpec:
        if state.ndim == 3:
            return pl.BlockSpec((1, dk, lanes), lambda j, i, *scalars: (scalars[which][i], 0, j))
        shape = (1, heads, dk, dv)
        return pl.BlockSpec(shape, lambda j, i, *scalars: (scalars[which][i], j, 0, 0))

    out, state = pl.pallas_call(
        functools.partial(_kernel, per_channel=per_channel, heads=heads),
        name=name,
        out_shape=(
            jax.ShapeDtypeStruct((rows, 1, v_heads * dv), F32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(blocks, rows),
            in_specs=[
                pl.BlockSpec((1, 1, *stacked.shape[2:]), lambda j, i, *_: (j // share, i, 0, 0)),
                *[row] * len(values),
                slot(0),
            ],
            out_specs=(row, slot(1)),
        ),
        input_output_aliases={5 + len(values): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit
        ),
        interpret=interpret,
    )(*decode_schedule(ragged, slots), stacked, *values, state)
    return out.reshape(v.shape), state


def _kernel(
    source, target, fresh, count, columns, values, *refs, per_channel: bool, heads: int
) -> None:
    """One row, for one block of heads.

    SMEM: source, target, fresh i32[S], count i32[1]. VMEM, all float32: columns [1, 1, n, dk] of
    queries, keys and decays per channel; values, decays per head and out [1, 1, Hv' dv]; before,
    after [1, Hv', dk, dv] or [1, dk, Hv' dv].
    """
    del source, target  # used by the index maps
    *decays, before, out, after = refs
    count_of_columns, dk = columns.shape[2:]
    k_heads = (count_of_columns - heads * per_channel) // 2
    lanes = values.shape[2]
    i = pl.program_id(1)

    def vector(at: int) -> tuple[int | slice, ...]:
        """Where the state's lanes [at, at + 128) are."""
        if before.ndim == 3:
            return 0, slice(None), slice(at, at + LANES)
        head, first = divmod(at, before.shape[3])
        return 0, head, slice(None), slice(first, first + LANES)

    @pl.when(i >= count[0])
    def _padding() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when(i < count[0])
    def _row() -> None:
        turned = columns[0, 0].T  # [dk, n]
        from_zeros = fresh[i] == 1

        @functools.cache
        def column(n: int) -> jax.Array:
            return jnp.broadcast_to(turned[:, n : n + 1], (dk, LANES))

        for at in range(0, lanes, LANES):
            part = slice(at, at + LANES)
            key_head, head = at * k_heads // lanes, at * heads // lanes
            q, k = column(key_head), column(k_heads + key_head)
            decay = column(2 * k_heads + head) if per_channel else decays[0][0, :, part]
            # Selected, since the slot may hold anything.
            old = jnp.where(from_zeros, 0.0, before[vector(at)])
            state = old * decay + k * values[0, :, part]
            after[vector(at)] = state
            out[0, :, part] = jnp.sum(state * q, axis=0, keepdims=True)

    # Without decode rows the null slot is written, with what it held.
    @pl.when((i == 0) & (count[0] == 0))
    def _nothing() -> None:
        after[...] = before[...]
