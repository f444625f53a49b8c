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

from pallas_kernels import storage
from pallas_kernels.gated_delta_net.operands import States, Weights
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_chip import LANES
from pallas_kernels.tpu_rows import decode_schedule

F32 = jnp.float32
ROWS = 16  # rows whose channels come in one transfer: the sublanes of a bfloat16 tile


def decode(
    tokens: tuple[jax.Array, jax.Array, jax.Array],
    state: States,
    ragged: RaggedBatch,
    slots: tuple[jax.Array, jax.Array],
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
        vmem: bytes of VMEM. The kernel claims all of it: in what is left XLA would put a pool of
            inputs that fits, and copy it there and back as a whole.
        interpret: as for `pl.pallas_call`.

    Returns:
        out [S, Hv, 128], 0 for rows that do not decode, and the new `state`.
    """
    qkv, a, b = tokens
    rows, channels = qkv.shape
    width, v_heads = weights.conv.shape[1], b.shape[1]
    heads, size = channels // LANES, min(rows, ROWS)
    bias = jnp.zeros(channels, qkv.dtype) if weights.conv_bias is None else weights.conv_bias
    layer = (weights.conv.T, bias[None], jnp.stack([weights.A_log, weights.dt_bias]))

    def part(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        return pl.BlockSpec((size, x.shape[1]), lambda i, *_: (i // size, 0))

    def whole(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda i, *_: (0, 0))

    def slot(which: int, x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, *x.shape[1:]), lambda i, *scalars: (scalars[which][i], 0, 0, 0))

    out = jax.ShapeDtypeStruct((rows, v_heads * LANES), qkv.dtype)
    out, *pools = pl.pallas_call(
        functools.partial(_kernel, k_heads=k_heads, max_beta=max_beta),
        name="gated_delta_net_decode",
        out_shape=(out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(rows,),
            in_specs=[
                *(part(x) for x in tokens),
                *(whole(x) for x in layer),
                *(slot(0, x) for x in state),
            ],
            out_specs=(part(out), *(slot(1, x) for x in state)),
            scratch_shapes=[
                pltpu.VMEM((width + 1, heads, LANES), F32),
                pltpu.VMEM((size, heads, LANES), F32),
                pltpu.VMEM((size, 2 * v_heads), F32),
                pltpu.VMEM((v_heads, LANES), F32),
                pltpu.VMEM((size, v_heads, LANES), F32),
            ],
        ),
        input_output_aliases={10: 1, 11: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem
        ),
        interpret=interpret,
    )(
        *decode_schedule(ragged, slots),
        *tokens,
        *layer,
        *state,
    )
    return out.reshape(rows, v_heads, LANES), States(*pools)


def _kernel(
    source, target, fresh, count, qkv, a, b, conv, bias, decays, inputs, before, out, inputs_after,
    after, taps, rows, gates, v_row, out_rows, *, k_heads: int, max_beta: float,
) -> None:  # fmt: skip
    """One row.

    SMEM: source, target, fresh i32[S], count i32[1]. VMEM: qkv [R, C]; a, b [R, Hv]; conv [W, C];
    bias [1, C]; decays [2, Hv], A_log and dt_bias; inputs, inputs_after [1, W - 1, C / 128, 128];
    before, after [1, Hv, 128, 128]; out [R, Hv 128]. Float32 scratch: taps [W + 1, C / 128, 128],
    the last of which is the bias; rows [R, C / 128, 128]; gates [R, 2 Hv]; v_row [Hv, 128];
    out_rows [R, Hv, 128].
    """
    del source, target  # used by the index maps
    size, heads, width = rows.shape[0], rows.shape[1], taps.shape[0] - 1
    v_heads = b.shape[1]
    group = v_heads // k_heads
    i = pl.program_id(0)
    r = lax.rem(i, size)

    @pl.when(i == 0)
    def _prepare_layer() -> None:
        for h in range(heads):
            lanes = slice(h * LANES, (h + 1) * LANES)
            taps[:width, h, :] = conv[:, lanes].astype(F32)
            taps[width:, h, :] = bias[:, lanes].astype(F32)

    # All rows of a block at once: a packed bfloat16 tile cannot be read at a dynamic row.
    @pl.when(r == 0)
    def _prepare_rows() -> None:
        for h in range(heads):
            rows[:, h, :] = qkv[:, h * LANES : (h + 1) * LANES].astype(F32)
        x = a[...].astype(F32) + decays[1:]
        softplus = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
        gates[:, :v_heads] = jnp.exp(-jnp.exp(decays[:1]) * softplus)
        gates[:, v_heads:] = max_beta * lax.logistic(b[...].astype(F32))
        out_rows[...] = jnp.zeros_like(out_rows)

    @pl.when(i < count[0])
    def _row() -> None:
        from_zeros = fresh[i] == 1

        def read(pool: Any, j: int) -> jax.Array:
            # Selected, since the slot may hold anything.
            return jnp.where(from_zeros, 0.0, storage.decode(pool[0, j]).astype(F32))

        tail = [*(read(inputs, j) for j in range(width - 1)), rows[r]]
        for j, x in enumerate(tail[1:]):
            inputs_after[0, j] = storage.encode(x, inputs.dtype)
        y = sum((x * taps[j] for j, x in enumerate(tail)), taps[width])
        y = y * lax.logistic(y)
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
            old = read(before, h)
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
        for h in range(v_heads):
            out[:, h * LANES : (h + 1) * LANES] = out_rows[:, h, :].astype(out.dtype)
