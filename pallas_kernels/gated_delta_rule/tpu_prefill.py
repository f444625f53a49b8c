"""Prefill on TPU: chunks of tokens in matrix products, states in VMEM from one chunk to the next.

The token axis is cut at multiples of CHUNK and where rows begin and end. The grid goes over (head
blocks, segments), so that every transfer is a whole, aligned chunk; tokens of a chunk that belong
to other segments are neutral: key, value, decay and write strength 0. A row's state is fetched from
its read slot, stays in VMEM while the row lasts, and leaves for its write slot.

Within a segment every stage is computed for all heads of the block before the next stage begins:
the inverse is a chain of small products, and only other heads can fill the matrix unit meanwhile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32
Tokens = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
CHUNK = 128
NEVER = -1e30  # a log decay: exp gives 0

# What is to be done in a segment, as bits.
VALID = 1  # has tokens of a prefill row
FIRST = 2  # the row begins
FRESH = 4  # and from zeros
OPENS = 8  # the chunk of tokens begins
NOTHING = 16  # the batch has no prefill rows


def prefill(
    tokens: Tokens,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: tuple[jax.Array, jax.Array],
    *,
    heads: int,
    scale: float,
    l2norm: bool,
    vmem_limit: int,
    interpret: object = False,
) -> tuple[jax.Array, jax.Array]:
    """Prefill rows of a batch; other rows touch no slot.

    `tokens` are q, k, v, g, beta, `slots` the slots to read and to write, as for
    `api.gated_delta_rule`. Matrix products take bfloat16 operands if q is
    bfloat16, else float32; sums and the state are float32.

    Args:
        heads: value heads per grid step; divides Hv and is a multiple of Hv / Hk.
        vmem_limit: bytes of VMEM that the kernel may use.
        interpret: as for `pl.pallas_call`.

    Returns:
        out [T, Hv, dv], 0 for tokens outside prefill rows, and the new `state`.
    """
    q, k, v, g, beta = tokens
    num_tokens, v_heads, dv = v.shape
    dk = q.shape[2]
    blocks = v_heads // heads
    k_heads = q.shape[1] // blocks
    # g and beta of a head block side by side, so that a block of lanes needs no offset.
    gates = jnp.stack([g, beta]).reshape(2, num_tokens, blocks, heads)
    gates = gates.transpose(2, 1, 0, 3).reshape(blocks, num_tokens, 2 * heads)
    flat = [x.reshape(num_tokens, -1) for x in (q, k, v)]
    missing = max(CHUNK - num_tokens, 0)
    if missing:
        flat = [jnp.pad(x, ((0, missing), (0, 0))) for x in flat]
        gates = jnp.pad(gates, ((0, 0), (0, missing), (0, 0)))
    segments = _segments(ragged, pl.cdiv(num_tokens, CHUNK), *slots)

    def part(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((CHUNK, width), lambda j, i, chunk, *_: (chunk[i], j))

    def slot(which: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, dk, dv), lambda j, i, *scalars: (scalars[which][i], j, 0, 0))

    kernel = functools.partial(_kernel, k_heads=k_heads, scale=scale, l2norm=l2norm)
    out, state = pl.pallas_call(
        kernel,
        name="gated_delta_prefill",
        out_shape=(
            jax.ShapeDtypeStruct((flat[2].shape[0], v_heads * dv), v.dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(segments),
            grid=(blocks, segments.chunk.shape[0]),
            in_specs=[
                part(k_heads * dk),
                part(k_heads * dk),
                part(heads * dv),
                pl.BlockSpec((1, CHUNK, 2 * heads), lambda j, i, chunk, *_: (j, chunk[i], 0)),
                slot(4),
            ],
            out_specs=(part(heads * dv), slot(5)),
        ),
        input_output_aliases={len(segments) + 4: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit
        ),
        interpret=interpret,
    )(*segments, *flat, gates, state)
    return out[:num_tokens].reshape(v.shape), state


class Segments(NamedTuple):
    """Per grid step, i32[N]: its chunk of tokens, the part [begin, end) of it, bits, and slots."""

    chunk: jax.Array
    begin: jax.Array
    end: jax.Array
    bits: jax.Array
    source: jax.Array
    target: jax.Array


def _segments(
    ragged: RaggedBatch, chunks: int, read_slots: jax.Array, write_slots: jax.Array
) -> Segments:
    """The token axis cut at multiples of CHUNK and at the ends of prefill rows; N = chunks + S + 1.

    Some segments are empty: where cuts coincide, and at the end. A grid step must name its slots
    even if it has no use for them. Naming those of an earlier step again moves nothing.
    """
    starts, last = ragged.query_start_loc, ragged.num_rows_padded - 1
    row = jnp.arange(starts.shape[0], dtype=jnp.int32)
    is_cut = (row >= ragged.counts[0]) & (row <= ragged.counts[1])
    total = chunks * CHUNK
    whole = jnp.arange(chunks, dtype=jnp.int32) * CHUNK
    begin = jnp.sort(jnp.concatenate([whole, jnp.where(is_cut, starts, total)]))
    end = jnp.append(begin[1:], jnp.int32(total))
    row = jnp.searchsorted(starts[1:], begin, side="right").astype(jnp.int32)
    valid = (row >= ragged.counts[0]) & (row < ragged.counts[1]) & (begin < end)
    row = jnp.minimum(row, last)
    chunk = jnp.minimum(begin // CHUNK, chunks - 1)
    opens = jnp.append(jnp.ones(1, bool), chunk[1:] != chunk[:-1])
    has_state = ragged.has_state[row]
    nothing = ragged.counts[1] == ragged.counts[0]
    bits = (
        jnp.where(valid, VALID, 0)
        + jnp.where(begin == starts[row], FIRST, 0)
        + jnp.where(has_state, 0, FRESH)
        + jnp.where(opens, OPENS, 0)
        + jnp.where(nothing, NOTHING, 0)
    )
    index = jnp.arange(begin.shape[0], dtype=jnp.int32)
    reader = lax.cummax(jnp.where(valid & has_state, index, -1))
    source = jnp.where(reader >= 0, read_slots[row[jnp.maximum(reader, 0)]], 0)
    writer = lax.cummax(jnp.where(valid, index, -1))
    # Before the first row: the slot that this row will write.
    row = jnp.where(writer >= 0, row[jnp.maximum(writer, 0)], jnp.minimum(ragged.counts[0], last))
    target = jnp.where(nothing, 0, write_slots[row])
    offset = chunk * CHUNK
    return Segments(chunk, begin - offset, end - offset, bits, source, target)


def _kernel(
    chunk, begin, end, bits, source, target, q, k, v, gates, before, out, after,
    *, k_heads: int, scale: float, l2norm: bool,
) -> None:  # fmt: skip
    """One segment, for one block of heads.

    SMEM: `Segments`. VMEM: q, k [C, Hk' dk]; v, out [C, Hv' dv]; gates [1, C, 2 Hv']; before, after
    f32[1, Hv', dk, dv]. `after` holds the running state: its block stays while the row lasts.
    """
    del chunk, source, target  # used by the index maps
    i = pl.program_id(1)
    what = bits[i]

    def is_set(bit: int) -> jax.Array:
        return (what & bit) != 0

    @pl.when(is_set(OPENS))
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when(is_set(VALID) & is_set(FIRST))
    def _() -> None:
        # Selected, since the slot may hold anything.
        after[...] = jnp.where(is_set(FRESH), 0.0, before[...])

    # Without prefill rows the null slot is written, with what it held.
    @pl.when((i == 0) & is_set(NOTHING))
    def _() -> None:
        after[...] = before[...]

    @pl.when(is_set(VALID))
    def _() -> None:
        inside = begin[i], end[i]
        _segment(inside, q, k, v, gates, out, after, k_heads=k_heads, scale=scale, l2norm=l2norm)


def _segment(part, q, k, v, gates, out, state, *, k_heads: int, scale: float, l2norm: bool) -> None:
    """Chunked gated delta rule in WY form over the tokens `part` = (begin, end) of a chunk."""
    _, heads, dk, dv = state.shape
    group = heads // k_heads
    H, K = range(heads), range(k_heads)
    dot = _products(q.dtype)
    row = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0)
    column = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)
    token = lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0)
    inside = (token >= part[0]) & (token < part[1])
    lower, strict = row >= column, row > column

    def load(ref, h: int, size: int) -> jax.Array:
        return jnp.where(inside, ref[:, h * size : (h + 1) * size].astype(F32), 0.0)

    gate = jnp.where(inside, gates[0], 0.0)
    beta = [gate[:, heads + h : heads + h + 1] for h in H]
    total = _exact(lower.astype(F32), gate[:, :heads])  # [C, Hv'] log decay since the chunk began
    total_t = total.T
    last = [total[CHUNK - 1 :, h : h + 1] for h in H]
    total = [total[:, h : h + 1] for h in H]
    growth = [jnp.exp(x) for x in total]
    ratio = [jnp.exp(jnp.where(lower, total[h] - total_t[h : h + 1], NEVER)) for h in H]

    keys, queries = ([load(ref, j, dk) for j in K] for ref in (k, q))
    if l2norm:
        keys, queries = (
            [x * lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-6) for x in xs]
            for xs in (keys, queries)
        )
    queries = [x * scale for x in queries]
    pairs = [jnp.concatenate([keys[j], queries[j]], axis=0) for j in K]
    scores = [dot(pairs[j], keys[j], transpose_rhs=True) for j in K]  # [2C, C]
    below = [jnp.where(strict, scores[h // group][:CHUNK] * ratio[h] * beta[h], 0.0) for h in H]
    inverse = _unit_lower_inverse(below, row, column, dot)

    values = [load(v, h, dv) * beta[h] for h in H]
    written = [keys[h // group] * (beta[h] * growth[h]) for h in H]
    solved = [dot(inverse[h], jnp.concatenate([values[h], written[h]], axis=1)) for h in H]
    grown = [queries[h // group] * growth[h] for h in H]
    pairs = [jnp.concatenate([solved[h][:, dv:], grown[h]], axis=0) for h in H]
    from_state = [dot(pairs[h], state[0, h]) for h in H]  # [2C, dv]
    delta = [solved[h][:, :dv] - from_state[h][:CHUNK] for h in H]
    from_chunk = [dot(scores[h // group][CHUNK:] * ratio[h], delta[h]) for h in H]
    rest = [keys[h // group] * jnp.exp(last[h] - total[h]) for h in H]
    added = [dot(rest[h], delta[h], transpose_lhs=True) for h in H]
    for h in H:
        lanes = slice(h * dv, (h + 1) * dv)
        new = from_state[h][CHUNK:] + from_chunk[h]
        out[:, lanes] = jnp.where(inside, new, out[:, lanes].astype(F32)).astype(out.dtype)
        state[0, h] = state[0, h] * jnp.exp(last[h]) + added[h]


def _products(dtype):
    """Matrix product with float32 sums, of operands rounded to `dtype`."""
    precision = lax.Precision.HIGHEST if dtype == F32 else lax.Precision.DEFAULT

    def dot(a, b, *, transpose_lhs: bool = False, transpose_rhs: bool = False) -> jax.Array:
        axes = ((0 if transpose_lhs else 1,), (1 if transpose_rhs else 0,))
        return lax.dot_general(
            a.astype(dtype), b.astype(dtype), (axes, ((), ())), precision=precision,
            preferred_element_type=F32,
        )  # fmt: skip

    return dot


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    return _products(F32)(a, b)


def _unit_lower_inverse(below, row, column, dot) -> list[jax.Array]:
    """Inverses of I + A for each strictly lower triangular A [C, C]; `row`, `column` are iotas.

    Diagonal blocks of twice the width: X - X B X, where B is A below the blocks that X inverts. No
    powers of A, which explode when keys repeat.
    """
    eye = (row == column).astype(F32)
    inverse = [eye - jnp.where(row // 2 == column // 2, a, 0.0) for a in below]
    width = 2
    while width < CHUNK:
        wide = 2 * width
        corner = (row // wide == column // wide) & (row // width > column // width)
        products = [dot(jnp.where(corner, a, 0.0), x) for a, x in zip(below, inverse, strict=True)]
        inverse = [x - dot(x, y) for x, y in zip(inverse, products, strict=True)]
        width = wide
    return inverse
