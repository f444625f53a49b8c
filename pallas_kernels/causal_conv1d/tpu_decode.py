"""Decode rows of the causal convolution on TPU: the tails of 16 rows are on their way together.

A row's channels are computed as [C / 128, 128], as its tail lies in its slot: so vectors are full
with one token.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import storage
from pallas_kernels.causal_conv1d.tpu_window import weighted_sum
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_chip import LANES
from pallas_kernels.tpu_rows import F32, Slots, decode_schedule

ROWS = 16  # rows per grid step: the sublanes of a bfloat16 tile


def decode(
    x: jax.Array,
    taps: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    activation: str | None,
    vmem_limit: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Decode rows of a batch; other rows touch no slot.

    Args:
        x: [S, C] of the first S tokens.
        taps: those of `tpu_window.taps_of`.
        state: [slots, W - 1, C / 128, 128].
        ragged: row boundaries.
        slots: the slots to read and to write, i32[S] each.
        activation: "silu" or None.
        vmem_limit: bytes of VMEM that the kernel may use.
        interpret: as for `pl.pallas_call`.

    Returns:
        y [S, C], 0 for rows that do not decode, and the new `state`.
    """
    rows, channels = x.shape
    size, heads = min(rows, ROWS), channels // LANES
    tokens = pl.BlockSpec((size, channels), lambda i, *_: (i, 0))
    return pl.pallas_call(
        functools.partial(_kernel, activation=activation),
        name="causal_conv1d_decode",
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(rows, size),),
            in_specs=[
                tokens,
                pl.BlockSpec((taps.shape[0], heads, LANES), lambda i, *_: (0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=(tokens, pl.BlockSpec(memory_space=pl.ANY)),
            scratch_shapes=[
                pltpu.VMEM((size, *state.shape[1:]), state.dtype),
                pltpu.VMEM((size, heads, LANES), F32),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        input_output_aliases={6: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit
        ),
        interpret=interpret,
    )(*decode_schedule(ragged, slots), x, taps.reshape(-1, heads, LANES), state)


def _kernel(
    source, target, fresh, count, x, taps, _, y, pool, tails, rows, sem, *, activation: str | None
) -> None:
    """ROWS rows. SMEM: `tpu_rows.decode_schedule`. VMEM: x, y [R, C]; taps [W or W + 1, C / 128,
    128]; scratch tails [R, W - 1, C / 128, 128] and f32 rows [R, C / 128, 128]. HBM: pool.
    """
    size, heads, _ = rows.shape
    keep = tails.shape[1]
    first = pl.program_id(0) * size
    used = jnp.clip(count[0] - first, 0, size)

    def each(act: Callable[[jax.Array], None]) -> None:
        lax.fori_loop(0, used, lambda r, _: act(r), None)

    def reading(r: jax.Array, act: Callable[[Any], None]) -> None:
        @pl.when(fresh[first + r] == 0)
        def _() -> None:
            act(pltpu.make_async_copy(pool.at[source[first + r]], tails.at[r], sem))

    def writing(r: jax.Array) -> Any:
        return pltpu.make_async_copy(tails.at[r], pool.at[target[first + r]], sem)

    def row(r: jax.Array) -> None:
        # Selected, since nothing was read for a row that starts from zeros.
        earlier = storage.decode(tails[r]).astype(F32)
        earlier = jnp.where(fresh[first + r] == 1, 0.0, earlier)
        inputs = [*(earlier[j] for j in range(keep)), rows[r]]
        total = weighted_sum(inputs, [taps[j] for j in range(taps.shape[0])], activation)
        for j, tap in enumerate(inputs[1:]):
            tails[r, j] = storage.encode(tap, tails.dtype)
        rows[r] = total

    each(lambda r: reading(r, lambda copy: copy.start()))
    for h in range(heads):
        rows[:, h, :] = x[:, h * LANES : (h + 1) * LANES].astype(F32)
    each(lambda r: reading(r, lambda copy: copy.wait()))
    each(row)
    each(lambda r: writing(r).start())
    # Selected, since padding tokens may hold anything.
    decodes = lax.broadcasted_iota(jnp.int32, (size, 1), 0) < used
    for h in range(heads):
        new = jnp.where(decodes, rows[:, h, :], 0.0)
        y[:, h * LANES : (h + 1) * LANES] = new.astype(y.dtype)
    each(lambda r: writing(r).wait())
