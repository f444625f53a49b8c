"""Decode on TPU: from projected channels to the output in one kernel, all states in place.

The grid goes over rows. The pipeline fetches both states of row i + 1 from its read slot while row
i is computed and row i - 1 is on its way to its write slot. In both pools a head of 128 channels is
a row of a tile, so that a row's channels become heads without being moved. All of it is float32, on
the vector units: with one token per row, a matrix unit would spend its time loading the state as
weights.
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
from pallas_kernels.gated_delta_net.operands import States, Weights
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_chip import LANES
from pallas_kernels.tpu_rows import F32, ROWS, Slots


def decode(
    tokens: tuple[jax.Array, jax.Array, jax.Array],
    state: States,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    weights: Weights,
    k_heads: int,
    max_beta: float,
    vmem: int,
    interpret: Any = False,
) -> tuple[jax.Array, States]:
    """Decode rows of a batch; other rows touch no slot.

    `tokens` are qkv, a, b of the first S tokens, `slots` the slots to read and to write, as for
    `api.gated_delta_net`; heads have 128 channels.

    Args:
        weights: of the layer.
        k_heads: Hk.
        max_beta: factor on sigmoid(b).
        vmem: bytes of VMEM that the kernel claims, see `tpu_rows.decode_whole`.
        interpret: as for `pl.pallas_call`.

    Returns:
        out [S, Hv, 128], 0 for rows that do not decode, and the new `state`.
    """
    rows, channels = tokens[0].shape
    v_heads, heads, size = tokens[2].shape[1], channels // LANES, min(rows, ROWS)
    taps = taps_of(weights.conv, weights.conv_bias).reshape(-1, heads, LANES)
    decays = jnp.stack([weights.A_log, weights.dt_bias])
    shapes = (
        (size, heads, LANES),
        (size, 2 * v_heads),
        (v_heads, LANES),
        (size, v_heads, LANES),
    )
    out, *pools = tpu_rows.decode_whole(
        functools.partial(_kernel, k_heads=k_heads, max_beta=max_beta), tokens, (taps, decays),
        state, ragged, slots, name="gated_delta_net_decode", width=v_heads * LANES,
        scratch=[pltpu.VMEM(shape, F32) for shape in shapes], vmem=vmem, interpret=interpret,
    )  # fmt: skip
    return out.reshape(rows, v_heads, LANES), States(*pools)


def _kernel(
    source, target, fresh, count, qkv, a, b, taps, decays, inputs, before, out, inputs_after,
    after, rows, gates, v_row, out_rows, *, k_heads: int, max_beta: float,
) -> None:  # fmt: skip
    """One row.

    SMEM: `tpu_rows.decode_schedule`. VMEM: qkv [R, C]; a, b [R, Hv]; taps [W or W + 1, C / 128,
    128]; decays [2, Hv], A_log and dt_bias; inputs, inputs_after [1, W - 1, C / 128, 128]; before,
    after [1, Hv, 128, 128]; out [R, Hv 128]. Float32 scratch: rows [R, C / 128, 128]; gates
    [R, 2 Hv]; v_row [Hv, 128]; out_rows [R, Hv, 128].
    """
    del source, target  # used by the index maps
    size, v_heads = b.shape
    group = v_heads // k_heads
    i = pl.program_id(0)
    r = lax.rem(i, size)

    # All rows of a block at once: a packed bfloat16 tile cannot be read at a dynamic row.
    @pl.when(r == 0)
    def _prepare_rows() -> None:
        convolution.cut(qkv, rows)
        x = a[...].astype(F32) + decays[1:]
        softplus = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
        gates[:, :v_heads] = jnp.exp(-jnp.exp(decays[:1]) * softplus)
        gates[:, v_heads:] = max_beta * lax.logistic(b[...].astype(F32))
        out_rows[...] = jnp.zeros_like(out_rows)

    @pl.when(i < count[0])
    def _row() -> None:
        from_zeros = fresh[i] == 1
        tails = inputs.at[0], inputs_after.at[0]
        y = convolution.advance(*tails, rows[r], taps, from_zeros, "silu")
        v_row[...] = y[2 * k_heads :]
        q, k = y[:k_heads], y[k_heads : 2 * k_heads]
        q, k = (x * lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-6) for x in (q, k))
        q = q * LANES**-0.5
        columns, both = jnp.concatenate([q, k], axis=0).T, jnp.sum(q * k, axis=1, keepdims=True)
        gate = gates[pl.ds(r, 1), :]
        for h in range(v_heads):
            at = h // group
            qh, kh = columns[:, at : at + 1], columns[:, k_heads + at : k_heads + at + 1]
            decay, beta = gate[:, h : h + 1], gate[:, v_heads + h : v_heads + h + 1]
            # The output comes from the old state too, so that both sums go over it at once.
            # Selected, since the slot may hold anything.
            old = jnp.where(from_zeros, 0.0, before[0, h])
            old_q, old_k = (jnp.sum(old * x, axis=0, keepdims=True) for x in (qh, kh))
            delta = beta * (v_row[h : h + 1] - decay * old_k)
            after[0, h] = decay * old + kh * delta
            out_rows[r, h : h + 1] = decay * old_q + both[at : at + 1] * delta

    # Without decode rows the null slot is written, with what it held.
    @pl.when((i == 0) & (count[0] == 0))
    def _nothing() -> None:
        inputs_after[...] = inputs[...]
        after[...] = before[...]

    @pl.when((r == size - 1) | (i == pl.num_programs(0) - 1))
    def _finish() -> None:
        convolution.join(out_rows, out)
