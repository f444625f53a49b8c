"""Paged attention in plain JAX: the definition of correct, and the path on CPU.

Both phases walk the context in blocks of pages with an online softmax in float32 (Milakov and
Gimelshein 2018, arXiv:1805.02867), so the cost follows the tokens that exist and not the width of
the table. Letters: T tokens, S rows, N query heads, K KV heads, R = N / K, H head dim, P pages,
G page size, M table width, B context tokens per iteration.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import storage
from pallas_kernels.paged_attention.pages import pack, unpack
from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32
LOWEST = -1e30  # stands for -inf, which would turn the difference of two masked maxima into NaN
# Context tokens per iteration: in decode the blocks of all rows together should stay in the cache.
DECODE_BLOCK = 64
PREFILL_BLOCK = 128
QUERY_BLOCK = 64  # tokens of one row that share a pass over the context in prefill


class Options(NamedTuple):
    """The static options of a call."""

    scale: float
    window: int | None
    softcap: float | None


class Softmax(NamedTuple):
    """An unfinished softmax over the context: [..., K, R, Q] for Q queries of one row."""

    highest: jax.Array  # f32[..., K, R, Q] highest score so far
    total: jax.Array  # f32[..., K, R, Q] sum of e^(score - highest)
    values: jax.Array  # f32[..., K, R, Q, H] sum of e^(score - highest) v


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    ragged: RaggedBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.paged_attention`."""
    options = Options(scale, window, softcap)
    pages = write(k, v, pages, table, ragged)
    num_tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    grouped = q.astype(F32).reshape(num_tokens, kv_heads, groups, dim)
    sinks = None if sinks is None else sinks.astype(F32).reshape(kv_heads, groups)
    out = _decode(grouped, pages, table, ragged, sinks, options)
    if not ragged.decode_only:
        out = _prefill(out, grouped, pages, table, ragged, sinks, options)
    return out.reshape(q.shape).astype(q.dtype), pages


def write(
    k: jax.Array, v: jax.Array, pages: jax.Array, table: jax.Array, ragged: RaggedBatch
) -> jax.Array:
    """Puts K and V [T, K, H] of this step into `pages`; padding tokens are dropped."""
    num_tokens, kv_heads, dim = k.shape
    num_pages, page_size = pages.shape[:2]
    rows = ragged.token_rows(num_tokens)
    positions = ragged.positions(num_tokens)
    column = (positions // page_size) % table.shape[1]
    page = table[jnp.minimum(rows, ragged.num_rows_padded - 1), column]
    page = jnp.where(rows < ragged.num_rows_padded, page, num_pages)
    kv = jnp.stack([k, v], axis=2).reshape(num_tokens, 2 * kv_heads, dim)
    kv = storage.encode(pack(kv, *pages.shape[2:]), pages.dtype)
    return pages.at[page, positions % page_size].set(kv, mode="drop")


def _decode(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    ragged: RaggedBatch,
    sinks: jax.Array | None,
    options: Options,
) -> jax.Array:
    """Attention of the decode rows, all at once: q [T, K, R, H] -> f32[T, K, R, H], 0 elsewhere."""
    rows = ragged.num_rows_padded
    decode = jnp.arange(rows, dtype=jnp.int32) < ragged.counts[0]
    end = jnp.where(decode, ragged.seq_lens, 0)
    first = _first_page(end - 1, options, pages)
    per_block = _pages_per_block(pages, table, DECODE_BLOCK)
    count = jnp.max(_blocks(first, end, per_block, pages), initial=0)
    queries = q[:rows, :, :, None]

    def row(
        state: Softmax, q: jax.Array, columns: jax.Array, start: jax.Array, end: jax.Array
    ) -> Softmax:
        k, v, positions = _context(pages, columns, start, per_block, q.shape)
        return _attend(state, q, k, v, _visible(positions, end[None] - 1, end, options), options)

    def body(i: jax.Array, state: Softmax) -> Softmax:
        return jax.vmap(row)(state, queries, table, first + i * per_block, end)

    state = lax.fori_loop(0, count, body, _empty(queries, sinks))
    out = _finish(state)[:, :, :, 0]
    return jnp.pad(out, ((0, q.shape[0] - rows), (0, 0), (0, 0), (0, 0)))


def _prefill(
    out: jax.Array,
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    ragged: RaggedBatch,
    sinks: jax.Array | None,
    options: Options,
) -> jax.Array:
    """Adds the prefill rows to `out` [T, K, R, H], one block of a row's tokens at a time."""
    num_tokens = q.shape[0]
    blocks = ragged.prefill_blocks(QUERY_BLOCK)
    per_block = _pages_per_block(pages, table, PREFILL_BLOCK)
    # A block may reach past the last token.
    padding = ((0, QUERY_BLOCK), (0, 0), (0, 0), (0, 0))
    q, out = jnp.pad(q, padding), jnp.pad(out, padding)
    index = jnp.arange(QUERY_BLOCK, dtype=jnp.int32)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        row, start, length, _ = blocks.block(i)
        # Position of the block's first token: tokens of the row before `start`, in all steps.
        begin = ragged.seq_lens[row] - (ragged.query_start_loc[row + 1] - start)
        first = _first_page(begin, options, pages)
        end = begin + length
        queries = jnp.moveaxis(lax.dynamic_slice_in_dim(q, start, QUERY_BLOCK), 0, 2)
        columns = table[row]

        def attend(j: jax.Array, state: Softmax) -> Softmax:
            start = first + j * per_block
            k, v, positions = _context(pages, columns, start, per_block, queries.shape)
            mask = _visible(positions, begin + index, end, options)
            return _attend(state, queries, k, v, mask, options)

        count = _blocks(first, end, per_block, pages)
        state = lax.fori_loop(0, count, attend, _empty(queries, sinks))
        # Past the block: 0, or overwritten by the rows that come later in the loop.
        inside = (index < length)[:, None, None, None]
        new = jnp.where(inside, jnp.moveaxis(_finish(state), 2, 0), 0.0)
        return lax.dynamic_update_slice_in_dim(out, new, start, 0)

    return lax.fori_loop(0, blocks.total, body, out)[:num_tokens]


def _pages_per_block(pages: jax.Array, table: jax.Array, block: int) -> int:
    return min(max(block // pages.shape[1], 1), table.shape[1])


def _first_page(position: jax.Array, options: Options, pages: jax.Array) -> jax.Array:
    """Logical page of the first token that the token at `position` sees."""
    if options.window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - options.window + 1, 0) // pages.shape[1]


def _blocks(first: jax.Array, end: jax.Array, per_block: int, pages: jax.Array) -> jax.Array:
    """Blocks of pages from logical page `first` to the one that holds token `end - 1`."""
    num_pages = (end + pages.shape[1] - 1) // pages.shape[1] - first
    return (num_pages + per_block - 1) // per_block


def _context(
    pages: jax.Array, columns: jax.Array, start: jax.Array, count: int, queries: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`count` logical pages of one row from `start`: K and V f32[K, B, H], positions i32[B].

    `queries` is the shape of what they are for, [K, R, Q, H].
    """
    size, kv_heads, dim = pages.shape[1], queries[0], queries[3]
    logical = start + jnp.arange(count, dtype=jnp.int32)
    context = storage.decode(pages[columns[logical % columns.shape[0]]])
    # On CPU a batched product of bfloat16 is unimplemented, hence float32 from here on.
    context = unpack(context, kv_heads, dim).astype(F32)
    context = context.reshape(count * size, kv_heads, 2, dim)
    positions = logical[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    k, v = (jnp.swapaxes(context[:, :, i], 0, 1) for i in range(2))
    return k, v, positions.reshape(-1)


def _visible(positions: jax.Array, query: jax.Array, end: jax.Array, options: Options) -> jax.Array:
    """bool[Q, B]: which `positions` [B] before `end` the queries at positions `query` [Q] see."""
    positions, query = positions[None], query[:, None]
    mask = (positions <= query) & (positions < end)
    return mask if options.window is None else mask & (positions > query - options.window)


def _empty(queries: jax.Array, sinks: jax.Array | None) -> Softmax:
    """The softmax of no tokens for queries [..., K, R, Q, H]; a sink is a score with v = 0."""
    shape = queries.shape[:-1]
    values = jnp.zeros(queries.shape, F32)
    if sinks is None:
        return Softmax(jnp.full(shape, LOWEST), jnp.zeros(shape, F32), values)
    highest = jnp.broadcast_to(sinks.reshape(*[1] * (len(shape) - 3), *sinks.shape, 1), shape)
    return Softmax(highest, jnp.ones(shape, F32), values)


def _attend(
    state: Softmax,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    options: Options,
) -> Softmax:
    """Adds B context tokens: q [K, R, Q, H], k and v [K, B, H], mask bool[Q, B]."""
    scores = options.scale * jnp.einsum("krqh,kbh->krqb", q, k)
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    # Everything masked may be NaN: select, since neither -inf nor a factor 0 removes a NaN.
    seen = mask[None, None]
    scores = jnp.where(seen, scores, LOWEST)
    v = jnp.where(jnp.any(mask, axis=0)[None, :, None], v, 0.0)
    highest = jnp.maximum(state.highest, jnp.max(scores, axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - highest[..., None]), 0.0)
    rescale = jnp.exp(state.highest - highest)
    return Softmax(
        highest,
        rescale * state.total + jnp.sum(weights, axis=-1),
        rescale[..., None] * state.values + jnp.einsum("krqb,kbh->krqh", weights, v),
    )


def _finish(state: Softmax) -> jax.Array:
    """The attention output: 0 for queries that saw nothing, NaN for those that saw one."""
    total = state.total[..., None]
    nothing = total == 0.0  # not total > 0, which would turn a NaN into zeros
    return jnp.where(nothing, 0.0, state.values / jnp.where(nothing, 1.0, total))
