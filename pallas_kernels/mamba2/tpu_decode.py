"""Decode on TPU: from projected channels to the output in one kernel, all states in place.

128 channels are a vector of lanes, which hold one head or several of one group: inputs, step
sizes, decays and outputs are rows of a tile, B and C are columns, and a sum over N goes over whole
vectors. All of it is float32, on the vector units: with one token per row, a matrix unit would
spend its time loading the state as weights.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_rows
from pallas_kernels.causal_conv1d import tpu_decode as convolution
from pallas_kernels.causal_conv1d.tpu_window import taps_of
from pallas_kernels.mamba2.operands import States, Weights
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_chip import LANES
from pallas_kernels.tpu_rows import F32, ROWS, Slots


def decode(
    xBC: jax.Array,
    dt: jax.Array,
    state: States,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    weights: Weights,
    dt_limit: tuple[float, float],
    vmem: int,
    interpret: Any = False,
) -> tuple[jax.Array, States]:
    """Decode rows of a batch; other rows touch no slot.

    Operands are those of `api.mamba2`, of S tokens, and `slots` the slots to read and to write.

    Args:
        weights: of the layer.
        dt_limit: lowest and highest step size.
        vmem: bytes of VMEM, all of which the kernel claims, see `tpu_rows.decode_whole`.
        interpret: as for `pl.pallas_call`.

    Returns:
        y [S, H * P], 0 for rows that do not decode, and the new `state`.
    """
    (rows, channels), inner = xBC.shape, state.recurrent.shape[2]
    size = min(rows, ROWS)
    taps = taps_of(weights.conv, weights.conv_bias).reshape(-1, channels // LANES, LANES)
    heads = jnp.stack([weights.A_log, weights.D, weights.dt_bias])
    scratch = ((2, inner), (size, channels), (size, inner), (size, inner), (2, inner))
    out, *pools = tpu_rows.decode_whole(
        functools.partial(_kernel, dt_limit=dt_limit), (xBC, dt), (taps, heads), state, ragged,
        slots, name="mamba2_decode", width=inner,
        scratch=[pltpu.VMEM((n, width // LANES, LANES), F32) for n, width in scratch],
        vmem=vmem, interpret=interpret,
    )  # fmt: skip
    return out, States(*pools)


def _kernel(
    source, target, fresh, count, xBC, dt, taps, heads, inputs, before, out, inputs_after, after,
    layer, rows, steps, out_rows, row, *, dt_limit: tuple[float, float],
) -> None:  # fmt: skip
    """One row.

    SMEM: `tpu_rows.decode_schedule`. VMEM: xBC [R, C]; dt [R, H]; taps [W or W + 1, C / 128, 128];
    heads [3, H], A_log, D and dt_bias; inputs, inputs_after [1, W - 1, C / 128, 128]; before, after
    [1, N, H P]; out [R, H P]. Float32 scratch, V = H P / 128: layer [2, V, 128], A and D of every
    channel; rows [R, C / 128, 128]; steps, out_rows [R, V, 128]; row [2, V, 128], decays and dt x.
    """
    del source, target  # used by the index maps
    size, vectors, _ = steps.shape
    state_size = before.shape[1]
    per_weight = state_size // LANES
    groups = (rows.shape[1] - vectors) // (2 * per_weight)
    i = pl.program_id(0)
    r = lax.rem(i, size)

    @pl.when(i == 0)
    def _prepare_layer() -> None:
        _spread(-jnp.exp(heads[:1]), layer.at[:1])
        _spread(heads[1:2], layer.at[1:])

    # All rows of a block at once: a packed bfloat16 tile cannot be read at a dynamic row.
    @pl.when(r == 0)
    def _prepare_rows() -> None:
        convolution.cut(xBC, rows)
        x = dt[...].astype(F32) + heads[2:]
        softplus = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
        _spread(jnp.clip(softplus, *dt_limit), steps)
        out_rows[...] = jnp.zeros_like(out_rows)

    @pl.when(i < count[0])
    def _row() -> None:
        from_zeros = fresh[i] == 1
        y = convolution.advance(inputs.at[0], inputs_after.at[0], rows[r], taps, from_zeros, "silu")
        x, step = y[:vectors], steps[r]
        row[0] = jnp.exp(step * layer[0])
        row[1] = step * x
        out_rows[r] = layer[1] * x
        columns = y[vectors:].T  # [128, 2 G N / 128]

        def weight(n: int) -> jax.Array:
            """[N, 128]: B of all groups, then C of all groups."""
            parts = [columns[:, at : at + 1] for at in range(n * per_weight, (n + 1) * per_weight)]
            return jnp.broadcast_to(jnp.concatenate(parts), (state_size, LANES))

        for group in range(groups):
            B, C = weight(group), weight(groups + group)
            for n in range(group * vectors // groups, (group + 1) * vectors // groups):
                lanes, at = slice(n * LANES, (n + 1) * LANES), slice(n, n + 1)
                # Selected, since the slot may hold anything.
                old = jnp.where(from_zeros, 0.0, before[0, :, lanes])
                new = old * row[0, at] + B * row[1, at]
                after[0, :, lanes] = new
                out_rows[r, at] = out_rows[r, at] + jnp.sum(new * C, axis=0, keepdims=True)

    # Without decode rows the null slot is written, with what it held.
    @pl.when((i == 0) & (count[0] == 0))
    def _nothing() -> None:
        inputs_after[...] = inputs[...]
        after[...] = before[...]

    @pl.when((r == size - 1) | (i == pl.num_programs(0) - 1))
    def _finish() -> None:
        convolution.join(out_rows, out)


def _spread(heads: jax.Array, channels: Any) -> None:
    """Puts one value per head [R, H] into all its channels, [R, V, 128]."""
    vectors = channels.shape[1]
    sharing = heads.shape[1] // vectors  # heads of a vector
    lane = lax.broadcasted_iota(jnp.int32, (heads.shape[0], LANES), 1)
    for n in range(vectors):
        first, *others = (heads[:, h : h + 1] for h in range(n * sharing, (n + 1) * sharing))
        vector = jnp.broadcast_to(first, lane.shape)
        for h, value in enumerate(others, 1):
            vector = jnp.where(lane < h * (LANES // sharing), vector, value)
        channels[:, n, :] = vector
