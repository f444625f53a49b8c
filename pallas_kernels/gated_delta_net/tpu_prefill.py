"""Prefill on TPU: convolution, gates and chunked gated delta rule in one kernel.

The grid goes over segments, see `tpu_rows.Segments`. A segment's channels are convolved in VMEM and
never leave it: what goes in are the projected channels, what comes out is the output. Both states
stay in VMEM while their row lasts.

Every stage is computed for all heads of a block before the next stage begins: the inverse is a
chain of small products, and only other heads can fill the matrix unit meanwhile.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_rows
from pallas_kernels.causal_conv1d.tpu_window import Window, taps_of
from pallas_kernels.gated_delta_net.operands import States, Weights
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_chip import LANES
from pallas_kernels.tpu_rows import CHUNK, F32, NEVER, Segments, Slots, products

LOG2_E = math.log2(math.e)


def prefill(
    tokens: tuple[jax.Array, jax.Array, jax.Array],
    state: States,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    weights: Weights,
    k_heads: int,
    max_beta: float,
    heads: int,
    vmem_limit: int,
    interpret: Any = False,
) -> tuple[jax.Array, States]:
    """Prefill rows of a batch; other rows touch no slot.

    `tokens` are qkv, a, b, `slots` the slots to read and to write, as for `api.gated_delta_net`;
    heads have 128 channels. Matrix products take bfloat16 operands if qkv is bfloat16, else
    float32; sums and the recurrent state are float32.

    Args:
        weights: of the layer.
        k_heads: Hk.
        max_beta: factor on sigmoid(b).
        heads: value heads whose stages are computed together.
        vmem_limit: bytes of VMEM that the kernel may use.
        interpret: as for `pl.pallas_call`.

    Returns:
        out [T, Hv, 128], 0 for tokens outside prefill rows, and the new `state`.
    """
    num_tokens, channels = tokens[0].shape
    v_heads, keep = tokens[2].shape[1], state.conv.shape[1]
    missing = max(CHUNK - num_tokens, 0)
    padded = [jnp.pad(x, ((0, missing), (0, 0))) for x in tokens]
    layer = (
        taps_of(weights.conv, weights.conv_bias),
        jnp.stack([weights.A_log, weights.dt_bias]),
    )
    segments = Segments.of(ragged, pl.cdiv(num_tokens, CHUNK), slots)
    out = jax.ShapeDtypeStruct((num_tokens + missing, v_heads * LANES), tokens[0].dtype)

    def part(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        return pl.BlockSpec((CHUNK, x.shape[1]), lambda i, chunk, *_: (chunk[i], 0))

    def whole(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda i, *_: (0, 0))

    def slot(which: int, x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, *x.shape[1:]), lambda i, *scalars: (scalars[which][i], 0, 0, 0))

    first_pool = len(segments) + len(tokens) + len(layer)
    out, *pools = pl.pallas_call(
        functools.partial(_kernel, k_heads=k_heads, max_beta=max_beta),
        name="gated_delta_net_prefill",
        out_shape=(out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(segments),
            grid=segments.chunk.shape,
            in_specs=[
                *(part(x) for x in padded),
                *(whole(x) for x in layer),
                *(slot(4, x) for x in state),
            ],
            out_specs=(part(out), *(slot(5, x) for x in state)),
            scratch_shapes=[
                *Window.scratch(channels, keep),
                pltpu.VMEM((v_heads // heads, CHUNK, heads), F32),
                pltpu.VMEM((v_heads, 3, CHUNK), F32),
            ],
        ),
        input_output_aliases={first_pool: 1, first_pool + 1: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit
        ),
        interpret=interpret,
    )(*segments, *padded, *layer, *state)
    return out[:num_tokens].reshape(num_tokens, v_heads, LANES), States(*pools)


def _kernel(
    chunk, begin, end, bits, source, target, qkv, a, b, taps, decays, inputs, before, out,
    inputs_after, after, *scratch, k_heads: int, max_beta: float,
) -> None:  # fmt: skip
    """One segment.

    SMEM: `Segments`. VMEM: qkv [CHUNK, C]; a, b [CHUNK, Hv]; taps [W or W + 1, C]; decays [2, Hv],
    A_log and dt_bias; inputs, inputs_after [1, W - 1, C / 128, 128]; before, after
    [1, Hv, 128, 128], of which `after` holds the running state; out [CHUNK, Hv 128]; the scratch of
    `Window`, and what `_gates` makes.
    """
    del chunk, source, target  # used by the index maps
    i = pl.program_id(0)
    what, window, (columns, rows) = bits[i], Window(*scratch[:3]), scratch[3:]
    v_heads = b.shape[1]
    group = v_heads // k_heads

    def is_set(bit: int) -> jax.Array:
        return (what & bit) != 0

    @pl.when(is_set(tpu_rows.OPENS))
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    # Without prefill rows the null slot is written, with what it held.
    @pl.when((i == 0) & is_set(tpu_rows.NOTHING))
    def _() -> None:
        inputs_after[...] = inputs[...]
        after[...] = before[...]

    @pl.when(is_set(tpu_rows.VALID) & is_set(tpu_rows.FIRST))
    def _() -> None:
        window.start_row(inputs, is_set(tpu_rows.FRESH))
        # Selected, since the slot may hold anything.
        after[...] = jnp.where(is_set(tpu_rows.FRESH), 0.0, before[...])

    @pl.when(is_set(tpu_rows.VALID))
    def _() -> None:
        first, last = begin[i], end[i]
        window.load(qkv, first, last)

        # What other segments hold may be NaN, and a product with 0 would spread it.
        @pl.when((first > 0) | (last < CHUNK))
        def _() -> None:
            window.clear(first, last)

        token = lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0)
        inside = (token >= first) & (token < last)
        _gates(a, b, decays, inside, max_beta, columns, rows)

        def heads(n: jax.Array, _: None) -> None:
            _block(n, window, taps, columns, rows, inside, out, after, group)

        # Two blocks are written out, which is faster by 4 % and what libtpu's profile can follow:
        # it takes time in the square of what a loop does at places that depend on its index.
        blocks = columns.shape[0]
        lax.fori_loop(0, blocks, heads, None, unroll=blocks <= 2)

    @pl.when(is_set(tpu_rows.VALID) & is_set(tpu_rows.LAST))
    def _() -> None:
        window.end_row(inputs_after)


def _gates(a, b, decays, inside, max_beta, columns, rows) -> None:
    """Gates of all value heads, 0 for tokens of other segments.

    columns [blocks, CHUNK, n]: log2 decay since the segment began. rows [Hv, 3, CHUNK]: the same
    without log2 beta, beta e^(decay until the chunk ends), and e^(decay of all of it).
    """
    x = a[...].astype(F32) + decays[1:]
    softplus = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
    g = jnp.where(inside, -jnp.exp(decays[:1]) * softplus, 0.0) * LOG2_E
    beta = jnp.where(inside, max_beta * lax.logistic(b[...].astype(F32)), 0.0).T
    total = products(F32)((_iota(0) >= _iota(1)).astype(F32), g)
    blocks, _, n = columns.shape
    for at in range(blocks):
        columns[at] = total[:, at * n : (at + 1) * n]
    total = total.T
    last = total[:, CHUNK - 1 :]
    rest, whole = beta * jnp.exp2(last - total), jnp.broadcast_to(jnp.exp2(last), total.shape)
    for at, row in enumerate((total - jnp.log2(beta), rest, whole)):
        rows[:, at, :] = row


def _iota(axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis)


def _block(n, window, taps, columns, rows, inside, out, state, group) -> None:
    """Chunked gated delta rule in WY form for block `n` of value heads."""
    v_heads, size, dtype = rows.shape[0], columns.shape[2], out.dtype
    k_heads = v_heads // group
    H, K = range(size), range(size // group)
    dot = products(dtype)

    def convolved(g: jax.Array) -> jax.Array:
        lanes = pl.ds(pl.multiple_of(g * LANES, LANES), LANES)
        return window.convolve(g, taps, lanes, "silu")

    def factor(x: jax.Array) -> jax.Array:
        return lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-6)

    first_key, first = n * len(K), n * size
    queries, keys = ([convolved(at + first_key + j) for j in K] for at in (0, k_heads))
    keys = [x * factor(x) for x in keys]
    queries = [x * jnp.where(inside, LANES**-0.5 * factor(x), 0.0) for x in queries]
    pairs = [jnp.concatenate([keys[j], queries[j]], axis=0).astype(dtype) for j in K]
    keys_t = [x.T for x in keys]
    scores = [dot(pairs[j], keys[j], transpose_rhs=True) for j in K]  # [2C, C]
    # Of the group's heads side by side: [2C, group * dv].
    states = [
        jnp.concatenate([state[0, first + j * group + i] for i in range(group)], axis=1) for j in K
    ]
    from_state = [dot(pairs[j], states[j]) for j in K]

    lower = _iota(0) >= _iota(1)
    total = [jnp.broadcast_to(columns[n, :, h : h + 1], (CHUNK, CHUNK)) for h in H]
    row = [rows[first + h] for h in H]
    # beta e^(decay between tokens); above the diagonal the difference may overflow.
    ratio = [jnp.exp2(jnp.where(lower, total[h] - row[h][:1], NEVER)) for h in H]
    below = [(scores[h // group][:CHUNK] * ratio[h]).astype(dtype) for h in H]
    mixing = [(scores[h // group][CHUNK:] * ratio[h]).astype(dtype) for h in H]
    inverse = _inverse(below, dot, dtype)

    growth = [jnp.exp2(x) for x in total]
    lanes = [slice(h % group * LANES, (h % group + 1) * LANES) for h in H]
    values = [convolved(2 * k_heads + first + h) for h in H]
    values = [values[h] - growth[h] * from_state[h // group][:CHUNK, lanes[h]] for h in H]
    delta = [dot(inverse[h], values[h]).astype(dtype) for h in H]
    new = [growth[h] * from_state[h // group][CHUNK:, lanes[h]] for h in H]
    new = [new[h] + dot(mixing[h], delta[h]) for h in H]
    added = [dot(keys_t[h // group] * row[h][1:2], delta[h]) for h in H]
    for h in H:
        at = pl.ds(pl.multiple_of((first + h) * LANES, LANES), LANES)
        # Either is 0 for a token.
        out[:, at] = out[:, at] + new[h].astype(dtype)
        state[0, first + h] = state[0, first + h] * row[h][2:] + added[h]


def _inverse(below, dot, dtype) -> list[jax.Array]:
    """Inverses of I + A for each A [C, C], of which only what is below the diagonal counts.

    Diagonal blocks of twice the width: X - X B X, where B is A below the blocks that X inverts. No
    powers of A, which explode when keys repeat. X is not rounded again where it stays.
    """
    row, column = _iota(0), _iota(1)
    eye = (row == column).astype(dtype)
    pair = ((row // 2 == column // 2) & (row > column)).astype(dtype)
    inverse = [eye - a * pair for a in below]
    width = 2
    while width < CHUNK:
        wide = 2 * width
        corner = ((row // wide == column // wide) & (row // width > column // width)).astype(dtype)
        right = [dot(a * corner, x) for a, x in zip(below, inverse, strict=True)]
        inverse = [x - dot(x, y).astype(dtype) for x, y in zip(inverse, right, strict=True)]
        width = wide
    return inverse
