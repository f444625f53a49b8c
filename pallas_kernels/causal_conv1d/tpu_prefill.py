"""Prefill rows of the causal convolution on TPU, tile by tile of a chunk in VMEM.

The grid goes over (blocks of channels, segments of the token axis); `tpu_rows.Segments` says which.
The pipeline fetches a row's tail from its read slot and takes the new one to its write slot.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_rows
from pallas_kernels.causal_conv1d.tpu_window import Window
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_chip import LANES
from pallas_kernels.tpu_rows import CHUNK, F32, Segments, Slots


def prefill(
    x: jax.Array,
    taps: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    activation: str | None,
    lanes: int,
    vmem_limit: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Prefill rows of a batch; other rows touch no slot.

    Args:
        x: [T, C].
        taps: those of `tpu_window.taps_of`.
        state: [slots, W - 1, C / 128, 128].
        ragged: row boundaries.
        slots: the slots to read and to write, i32[S] each.
        activation: "silu" or None.
        lanes: channels per grid step.
        vmem_limit: bytes of VMEM that the kernel may use.
        interpret: as for `pl.pallas_call`.

    Returns:
        y [T, C], 0 for tokens outside prefill rows, and the new `state`.
    """
    num_tokens, channels = x.shape
    keep = state.shape[1]
    x = jnp.pad(x, ((0, max(CHUNK - num_tokens, 0)), (0, 0)))
    segments = Segments.of(ragged, pl.cdiv(num_tokens, CHUNK), slots)
    tokens = pl.BlockSpec((CHUNK, lanes), lambda j, i, chunk, *_: (chunk[i], j))

    def slot(which: int) -> pl.BlockSpec:
        block = (1, keep, lanes // LANES, LANES)
        return pl.BlockSpec(block, lambda j, i, *scalars: (scalars[which][i], 0, j, 0))

    y, state = pl.pallas_call(
        functools.partial(_kernel, activation=activation),
        name="causal_conv1d_prefill",
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(segments),
            grid=(channels // lanes, segments.chunk.shape[0]),
            in_specs=[
                tokens,
                pl.BlockSpec((taps.shape[0], lanes), lambda j, i, *_: (0, j)),
                slot(4),
            ],
            out_specs=(tokens, slot(5)),
            scratch_shapes=list(Window.scratch(lanes, keep)),
        ),
        input_output_aliases={len(segments) + 2: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit
        ),
        interpret=interpret,
    )(*segments, x, taps, state)
    return y[:num_tokens], state


def _kernel(
    chunk, begin, end, bits, source, target, x, taps, before, y, after, *scratch,
    activation: str | None,
) -> None:  # fmt: skip
    """One segment, for one block of channels. SMEM: `Segments`. VMEM: x, y [CHUNK, C]; taps
    [W or W + 1, C]; before, after [1, W - 1, C / 128, 128]; the scratch of `Window`.
    """
    del chunk, source, target  # used by the index maps
    i = pl.program_id(1)
    what, window = bits[i], Window(*scratch)

    def is_set(bit: int) -> jax.Array:
        return (what & bit) != 0

    @pl.when(is_set(tpu_rows.OPENS))
    def _() -> None:
        y[...] = jnp.zeros_like(y)

    # Without prefill rows the null slot is written, with what it held.
    @pl.when((i == 0) & is_set(tpu_rows.NOTHING))
    def _() -> None:
        after[...] = before[...]

    @pl.when(is_set(tpu_rows.VALID) & is_set(tpu_rows.FIRST))
    def _() -> None:
        window.start_row(before, is_set(tpu_rows.FRESH))

    @pl.when(is_set(tpu_rows.VALID))
    def _() -> None:
        first, last = begin[i], end[i]
        window.load(x, first, last)
        token = lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0)
        inside = (token >= first) & (token < last)

        def vector(g: jax.Array, _: None) -> None:
            lanes = pl.ds(pl.multiple_of(g * LANES, LANES), LANES)
            new = window.convolve(g, taps, lanes, activation)
            y[:, lanes] = jnp.where(inside, new, y[:, lanes].astype(F32)).astype(y.dtype)

        lax.fori_loop(0, x.shape[1] // LANES, vector, None, unroll=4)

    @pl.when(is_set(tpu_rows.VALID) & is_set(tpu_rows.LAST))
    def _() -> None:
        window.end_row(after)
