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
from pallas_kernels.tpu_rows import F32, ROWS, Slots, decode_schedule


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


def cut(x: Any, rows: Any) -> None:
    """Puts x [R, C] into rows f32[R, C / 128, 128]."""
    for n in range(rows.shape[1]):
        rows[:, n, :] = x[:, n * LANES : (n + 1) * LANES].astype(F32)


def join(rows: Any, x: Any) -> None:
    """Puts rows f32[R, C / 128, 128] into x [R, C]."""
    for n in range(rows.shape[1]):
        x[:, n * LANES : (n + 1) * LANES] = rows[:, n, :].astype(x.dtype)


def advance(
    before: Any, after: Any, x: jax.Array, taps: Any, from_zeros: jax.Array, activation: str | None
) -> jax.Array:
    """One token of one row: x f32[C / 128, 128] -> the same of y.

    before, after [W - 1, C / 128, 128]: the row's tail, which may be one buffer; what `before`
    holds does not matter if the row starts from zeros. taps [W or W + 1, C / 128, 128]: those of
    `tpu_window.taps_of`.
    """

    def earlier(j: int) -> jax.Array:
        # Selected, since the slot may hold anything.
        return jnp.where(from_zeros, 0.0, storage.decode(before[j]).astype(F32))

    inputs = [*(earlier(j) for j in range(before.shape[0])), x]
    for j, tap in enumerate(inputs[1:]):
        after[j] = storage.encode(tap, after.dtype)
    return weighted_sum(inputs, [taps[j] for j in range(taps.shape[0])], activation)


def _kernel(
    source, target, fresh, count, x, taps, _, y, pool, tails, rows, sem, *, activation: str | None
) -> None:
    """ROWS rows. SMEM: `tpu_rows.decode_schedule`. VMEM: x, y [R, C]; taps [W or W + 1, C / 128,
    128]; scratch tails [R, W - 1, C / 128, 128] and f32 rows [R, C / 128, 128]. HBM: pool.
    """
    size = rows.shape[0]
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
        tail, from_zeros = tails.at[r], fresh[first + r] == 1
        rows[r] = advance(tail, tail, rows[r], taps, from_zeros, activation)

    each(lambda r: reading(r, lambda copy: copy.start()))
    cut(x, rows)
    each(lambda r: reading(r, lambda copy: copy.wait()))
    each(row)
    each(lambda r: writing(r).start())
    # Selected, since padding tokens may hold anything.
    decodes = lax.broadcasted_iota(jnp.int32, (size, 1, 1), 0) < used
    rows[...] = jnp.where(decodes, rows[...], 0.0)
    join(rows, y)
    each(lambda r: writing(r).wait())
