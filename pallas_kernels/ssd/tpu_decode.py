"""Decode on TPU: one token per row, one transfer of each state in and one out.

The grid goes over (head blocks, rows). The pipeline fetches the state of row i + 1 from its read
slot while row i is computed and row i - 1 is on its way to its write slot. Rows are computed on
the vector units in float32: channels lie along the lanes, so that x, decay and y are rows, B and C
are columns, and a sum over N goes over whole vectors.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_chip import LANES
from pallas_kernels.tpu_rows import F32, Slots, decode_schedule


def decode(
    x: jax.Array,
    g: jax.Array,
    B: jax.Array,
    C: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    heads: int,
    vmem_limit: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Decode rows of a batch; other rows touch no slot.

    Args:
        x: f32[S, H, P] inputs times dt, of the first S tokens.
        g: f32[S, H] log decay.
        B: [S, G, N] input weights.
        C: [S, G, N] output weights.
        state: f32[slots, N, H * P].
        ragged: row boundaries.
        slots: the slots to read and to write, i32[S] each.
        heads: heads per grid step, see `tpu_chip.head_block`.
        vmem_limit: bytes of VMEM that the kernel may use.
        interpret: as for `pl.pallas_call`.

    Returns:
        y f32[S, H, P] without the skip, 0 for rows that do not decode, and the new `state`.
    """
    rows, all_heads, width = x.shape
    blocks, lanes, size = all_heads // heads, heads * width, B.shape[2]
    decay = jnp.broadcast_to(jnp.exp(g)[:, :, None], x.shape).reshape(rows, 1, -1)
    # B and C of the groups of a head block, side by side.
    parts = min(blocks, B.shape[1])
    weights = jnp.stack([B, C], axis=1).astype(F32).reshape(rows, 2, parts, -1, size)
    weights = weights.transpose(2, 0, 1, 3, 4).reshape(parts, rows, -1, size)
    row = pl.BlockSpec((1, 1, lanes), lambda j, i, *_: (i, 0, j))

    def slot(which: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, size, lanes), lambda j, i, *scalars: (scalars[which][i], 0, j))

    y, state = pl.pallas_call(
        _kernel,
        name="ssd_decode",
        out_shape=(
            jax.ShapeDtypeStruct(decay.shape, F32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(blocks, rows),
            in_specs=[
                row,
                row,
                pl.BlockSpec(
                    (1, 1, *weights.shape[2:]),
                    lambda j, i, *_: (j * parts // blocks if parts > 1 else 0, i, 0, 0),
                ),
                slot(0),
            ],
            out_specs=(row, slot(1)),
        ),
        input_output_aliases={7: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit
        ),
        interpret=interpret,
    )(*decode_schedule(ragged, slots), x.reshape(decay.shape), decay, weights, state)
    return y.reshape(x.shape), state


def _kernel(source, target, fresh, count, x, decay, weights, before, y, after) -> None:
    """One row, for one block of heads.

    SMEM: source, target, fresh i32[S], count i32[1]. VMEM, all float32: x, decay, y [1, 1, H' P];
    weights [1, 1, 2 G', N]; before, after [1, N, H' P].
    """
    del source, target  # used by the index maps
    lanes = x.shape[2]
    groups, size = weights.shape[2] // 2, weights.shape[3]
    i = pl.program_id(1)

    @pl.when(i >= count[0])
    def _padding() -> None:
        y[...] = jnp.zeros_like(y)

    @pl.when(i < count[0])
    def _row() -> None:
        columns = weights[0, 0].T  # [N, 2 G']
        from_zeros = fresh[i] == 1
        for group in range(groups):
            b, c = (
                jnp.broadcast_to(columns[:, n : n + 1], (size, LANES))
                for n in (group, groups + group)
            )
            begin = group * lanes // groups
            for at in range(begin, begin + lanes // groups, LANES):
                part = slice(at, at + LANES)
                # Selected, since the slot may hold anything.
                old = jnp.where(from_zeros, 0.0, before[0, :, part])
                state = old * decay[0, :, part] + b * x[0, :, part]
                after[0, :, part] = state
                y[0, :, part] = jnp.sum(state * c, axis=0, keepdims=True)

    # Without decode rows the null slot is written, with what it held.
    @pl.when((i == 0) & (count[0] == 0))
    def _nothing() -> None:
        after[...] = before[...]
