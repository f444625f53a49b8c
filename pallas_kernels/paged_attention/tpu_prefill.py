"""Attention of prefill rows on TPU: flash attention over pages, by tiles of one row's tokens.

All tiles of all rows and all their blocks of pages are one stream: while a block is used, the next
one (of this tile or the next) is on its way. A block is taken apart into K and V of each head once
per tile. Queries, too, are taken apart once per tile, into rows (token, head of the group), so that
one product serves all query heads of a KV head, and nothing outside has to transpose. The products
of the next scores are independent of the softmax of these ones: the compiler runs both at once.

Scores are [keys, rows]: the softmax goes along sublanes, its state is one number per lane, and the
weights stay in the matrix unit while V^T [H, keys] streams through it. With H 128 this fills it; V
that stays there, while weights stream, would fill its half. Rows of ones below V^T sum the weights.

Letters as in `tpu_decode`; R here: query heads per KV head, padded.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_copies import clear_unseen, forget, start_block, wait_block
from pallas_kernels.paged_attention.tpu_heads import join_heads, split_heads, split_kv
from pallas_kernels.paged_attention.tpu_layout import (
    F32,
    LOG2E,
    LOWEST,
    Options,
    as_rows,
    divide,
    modulo,
    precision,
)
from pallas_kernels.paged_attention.tpu_prefill_layout import SLOTS, SUBLANES, PrefillLayout
from pallas_kernels.ragged import RaggedBatch

# In the cursor: row, first token and index of the next block to copy; blocks copied and used so
# far; tokens on their way out.
ROW, START, INDEX, COPIED, USED, LEAVING = range(6)


class _Refs(NamedTuple):
    """What the kernel is given, in its order."""

    table: Any  # i32[S * M], and the row boundaries, in scalar memory
    starts: Any
    seq_lens: Any
    counts: Any
    sinks: Any  # f32[K, 1, rows] logits of the sinks in units of log 2
    q: Any  # [T, N, H] in HBM
    decoded: Any  # [S, N, H] output of the decode rows, in HBM
    pages: Any  # [P, W, L] in HBM
    out: Any  # [T, N, H] in HBM
    tokens_in: Any  # [tile, N, H]
    tokens_out: Any  # [tile, N, H]
    queries: Any  # [K, tile * R, H]
    buffer: Any  # [SLOTS, B, W, L]
    words: Any  # [columns of a piece, L] of 32 bits
    keys: Any  # [K, block tokens, H]
    values: Any  # [K, H + rows of ones, block tokens]
    scores: Any  # f32[2, block tokens, rows]
    change: Any  # f32[2, 2, 1, rows] highest score with these, and its factor on older weights
    highest: Any  # f32[K, parts, 1, rows] highest score so far
    sums: Any  # f32[K, parts, H + 8, rows] weighted sums of V, and those of weights
    cursor: Any  # i32[6], see ROW
    filled: Any  # i32[SLOTS], see `wait_block`
    page_sems: Any
    in_sems: Any  # of each part of a tile
    out_sems: Any


class _Tile(NamedTuple):
    """A tile of a row, in scalars."""

    row: jax.Array
    start: jax.Array  # first token
    length: jax.Array  # tokens
    begin: jax.Array  # position of the first token
    first: jax.Array  # first logical page that it sees
    num_pages: jax.Array  # from there on
    blocks: jax.Array

    @property
    def end(self) -> jax.Array:
        """Position after the last token."""
        return self.begin + self.length


def prefill(
    q: jax.Array,
    decoded: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    ragged: RaggedBatch,
    sinks: jax.Array | None,
    options: Options,
    *,
    vmem_limit: int,
    interpret: Any = False,
) -> jax.Array:
    """Attention of the prefill rows: q [T, N, H] -> [T, N, H].

    Tokens of decode rows get `decoded` [S, N, H], padding tokens 0.
    """
    layout = PrefillLayout.of(q, pages, table, options.kv_heads, vmem_limit)
    q, decoded = (layout.pad_heads(x) for x in (q, decoded))
    kernel = functools.partial(_prefill_kernel, layout=layout, options=options)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(1,),
        in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), anywhere, anywhere, anywhere],
        out_specs=anywhere,
        scratch_shapes=_scratch(layout, q.dtype, pages.dtype),
    )
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=grid_spec,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,  # of copies: each costs as much as its start
            vmem_limit_bytes=vmem_limit,
        ),
        interpret=interpret,
        name="paged_attention_prefill",
    )
    out = call(
        table.reshape(-1), ragged.query_start_loc, ragged.seq_lens, ragged.counts,
        layout.sink_rows(sinks), q, decoded, as_rows(pages, layout.pages),
    )  # fmt: skip
    return layout.drop_heads(out)


def _scratch(layout: PrefillLayout, dtype: Any, pages_dtype: Any) -> list[Any]:
    heads, pages, tokens = layout.kv_heads, layout.pages, layout.pages.block_tokens
    rows, dim = layout.tile * layout.groups, pages.dim
    per_token = pltpu.VMEM((layout.tile, heads * layout.groups, dim), dtype)
    state = pltpu.VMEM((heads, layout.parts, 1, layout.rows), F32)
    word = F32 if pages.packing == 1 else jnp.uint32
    return [
        per_token,
        per_token,
        pltpu.VMEM((heads, rows, dim), dtype),
        pltpu.VMEM((SLOTS, pages.block, pages.page_rows, pages.lanes), pages_dtype),
        pltpu.VMEM((layout.piece * pages.page_rows // pages.packing, pages.lanes), word),
        pltpu.VMEM((heads, tokens, dim), dtype),
        pltpu.VMEM((heads, dim + layout.sum_rows, tokens), dtype),
        pltpu.VMEM((2, tokens, layout.rows), F32),
        pltpu.VMEM((2, 2, 1, layout.rows), F32),
        state,
        pltpu.VMEM((heads, layout.parts, dim + SUBLANES, layout.rows), F32),
        pltpu.SMEM((6,), jnp.int32),
        pltpu.SMEM((SLOTS,), jnp.int32),
        pltpu.SemaphoreType.DMA((SLOTS,)),
        pltpu.SemaphoreType.DMA((layout.parts,)),
        pltpu.SemaphoreType.DMA((layout.parts,)),
    ]


def _prefill_kernel(*refs: Any, layout: PrefillLayout, options: Options) -> None:
    ref = _Refs(*refs)
    begin, stop = ref.counts[0], ref.counts[1]
    ref.cursor[ROW] = begin
    ref.cursor[START] = ref.starts[begin]
    for i in (INDEX, COPIED, USED, LEAVING):
        ref.cursor[i] = 0

    @pl.when(begin < stop)
    def _() -> None:
        _start_queries(ref, layout, _tile_at(ref, layout, options, begin, ref.starts[begin]))

    _start_next_block(ref, layout, options)
    forget(ref.filled, layout.pages)
    ones = (layout.kv_heads, layout.sum_rows, layout.pages.block_tokens)
    ref.values[:, layout.pages.dim :] = jnp.ones(ones, ref.values.dtype)
    _each(jnp.int32(layout.parts), lambda part: _clear_part(ref, layout, options, part))
    _fill_the_rest(ref, layout)

    def do_row(row: jax.Array, _: None) -> None:
        def do_tile(i: jax.Array, _: None) -> None:
            start = ref.starts[row] + i * layout.tile
            _do_tile(ref, layout, options, _tile_at(ref, layout, options, row, start))

        tokens = ref.starts[row + 1] - ref.starts[row]
        lax.fori_loop(0, divide(tokens + (layout.tile - 1), layout.tile), do_tile, None)

    lax.fori_loop(begin, stop, do_row, None)
    _each(jnp.int32(layout.parts), lambda part: _await_out(ref, layout, part))


def _each(count: jax.Array, do: Callable[[jax.Array], None]) -> None:
    lax.fori_loop(0, count, lambda i, _: do(i), None)


def _fill_the_rest(ref: _Refs, layout: PrefillLayout) -> None:
    """The output of decode rows, and zeros for padding tokens."""
    num_tokens, zero = ref.out.shape[0], jnp.int32(0)
    for start in (True, False):
        _copy_tokens(ref.decoded, ref.out, ref.out_sems.at[0], zero, zero, ref.counts[0], start)
    used = ref.starts[ref.counts[1]]

    @pl.when(used < num_tokens)
    def _() -> None:
        ref.tokens_out[...] = jnp.zeros(ref.tokens_out.shape, ref.tokens_out.dtype)

    def do_part(i: jax.Array) -> None:
        first = used + i * layout.row_tokens
        length = jnp.minimum(num_tokens - first, layout.row_tokens)
        for start in (True, False):
            _copy_tokens(ref.tokens_out, ref.out, ref.out_sems.at[0], zero, first, length, start)

    _each(divide(num_tokens - used + (layout.row_tokens - 1), layout.row_tokens), do_part)


def _copy_tokens(
    source: Any, target: Any, sem: Any, source_at: jax.Array, target_at: jax.Array,
    length: jax.Array, start: bool,
) -> None:  # fmt: skip
    """Starts the copies of `length` tokens, or waits for them: sizes of copies are static."""
    for bit in range(min(source.shape[0], target.shape[0]).bit_length()):
        size = 1 << bit
        before = (length >> (bit + 1)) << (bit + 1)

        @pl.when(length & size != 0)
        def _(size: int = size, before: jax.Array = before) -> None:
            copy = pltpu.make_async_copy(
                source.at[pl.ds(source_at + before, size)],
                target.at[pl.ds(target_at + before, size)],
                sem,
            )
            copy.start() if start else copy.wait()


def _move_queries(
    ref: _Refs, layout: PrefillLayout, tile: _Tile, part: jax.Array, start: bool
) -> None:
    at, length = part * layout.row_tokens, layout.tokens_of(part, tile.length)
    sem = ref.in_sems.at[part]
    _copy_tokens(ref.q, ref.tokens_in, sem, tile.start + at, at, length, start)


def _start_queries(ref: _Refs, layout: PrefillLayout, tile: _Tile) -> None:
    parts = layout.parts_of(tile.length)
    _each(parts, lambda part: _move_queries(ref, layout, tile, part, start=True))


def _start_out(ref: _Refs, layout: PrefillLayout, tile: _Tile, part: jax.Array) -> None:
    at, length = part * layout.row_tokens, layout.tokens_of(part, tile.length)
    _copy_tokens(
        ref.tokens_out, ref.out, ref.out_sems.at[part], at, tile.start + at, length, start=True
    )


def _await_out(ref: _Refs, layout: PrefillLayout, part: jax.Array) -> None:
    """Waits until a part of the last tile is out."""
    zero, length = jnp.int32(0), layout.tokens_of(part, ref.cursor[LEAVING])
    _copy_tokens(ref.tokens_out, ref.out, ref.out_sems.at[part], zero, zero, length, start=False)


def _tile_at(
    ref: _Refs, layout: PrefillLayout, options: Options, row: jax.Array, start: jax.Array
) -> _Tile:
    size, per_block = layout.pages.page_size, layout.pages.block
    stop = ref.starts[row + 1]
    length = jnp.minimum(stop - start, layout.tile)
    begin = ref.seq_lens[row] - (stop - start)
    first = jnp.int32(0)
    if options.window is not None:
        first = divide(jnp.maximum(begin - options.window + 1, 0), size)
    count = divide(begin + length + (size - 1), size) - first
    return _Tile(row, start, length, begin, first, count, divide(count + per_block - 1, per_block))


def _after(ref: _Refs, tile: _Tile) -> tuple[jax.Array, jax.Array]:
    """Row and first token of the next tile; the row may be one past the last."""
    start = tile.start + tile.length
    return jnp.where(start == ref.starts[tile.row + 1], tile.row + 1, tile.row), start


def _start_next_block(ref: _Refs, layout: PrefillLayout, options: Options) -> None:
    """Starts the copies of the block at the cursor, into the slot that is not in use."""
    row, start, index = ref.cursor[ROW], ref.cursor[START], ref.cursor[INDEX]

    @pl.when(row < ref.counts[1])
    def _() -> None:
        tile = _tile_at(ref, layout, options, row, start)
        done = index * layout.pages.block
        slot = modulo(ref.cursor[COPIED], SLOTS)
        start_block(
            ref.pages, ref.table, ref.buffer, ref.page_sems, slot,
            row * layout.width, tile.first + done, tile.num_pages - done,
            layout.pages, layout.width, ring=options.window is not None,
        )  # fmt: skip
        last = index + 1 == tile.blocks
        next_row, next_start = _after(ref, tile)
        ref.cursor[ROW] = jnp.where(last, next_row, row)
        ref.cursor[START] = jnp.where(last, next_start, start)
        ref.cursor[INDEX] = jnp.where(last, 0, index + 1)
        ref.cursor[COPIED] = ref.cursor[COPIED] + 1


def _do_tile(ref: _Refs, layout: PrefillLayout, options: Options, tile: _Tile) -> None:
    parts = layout.parts_of(tile.length)

    def begin(part: jax.Array) -> None:
        _move_queries(ref, layout, tile, part, start=False)
        split_heads(ref.tokens_in, ref.queries, part, tile.length, layout, _factor(options))

    def end(part: jax.Array) -> None:
        _await_out(ref, layout, part)
        join_heads(ref.sums, ref.tokens_out, part, layout)
        _clear_part(ref, layout, options, part)
        _start_out(ref, layout, tile, part)

    _each(parts, begin)
    next_row, next_start = _after(ref, tile)

    @pl.when(next_row < ref.counts[1])
    def _() -> None:
        _start_queries(ref, layout, _tile_at(ref, layout, options, next_row, next_start))

    _each(tile.blocks, lambda i: _do_block(ref, layout, options, tile, parts, i))
    _each(parts, end)
    lax.fori_loop(parts, layout.parts, lambda part, _: _await_out(ref, layout, part), None)
    ref.cursor[LEAVING] = tile.length


def _factor(options: Options) -> float:
    """On the queries, so that scores come out in units of log 2, or ready for tanh."""
    if options.softcap is None:
        return options.scale * LOG2E
    return options.scale / options.softcap


def _clear_part(ref: _Refs, layout: PrefillLayout, options: Options, part: jax.Array) -> None:
    """The softmax of no tokens; a sink is a score with V = 0."""
    weight = jnp.full((SUBLANES, layout.rows), float(options.sinks), F32)
    for j in range(layout.kv_heads):
        lowest = jnp.full((1, layout.rows), LOWEST, F32)
        ref.highest[j, part] = ref.sinks[j] if options.sinks else lowest
        ref.sums[j, part, : layout.pages.dim] = jnp.zeros((layout.pages.dim, layout.rows), F32)
        ref.sums[j, part, layout.pages.dim :] = weight


def _do_block(
    ref: _Refs, layout: PrefillLayout, options: Options, tile: _Tile, parts: jax.Array, i: jax.Array
) -> None:
    pages = layout.pages
    slot = modulo(ref.cursor[USED], SLOTS)
    ref.cursor[USED] = ref.cursor[USED] + 1
    _start_next_block(ref, layout, options)
    here = jnp.minimum(tile.num_pages - i * pages.block, pages.block)
    wait_block(ref.buffer, ref.filled, ref.page_sems, slot, here, pages)
    origin = (tile.first + i * pages.block) * pages.page_size
    low = jnp.int32(0)
    if options.window is not None:
        low = jnp.maximum(tile.begin - options.window + 1, 0) - origin
    clear_unseen(ref.buffer, slot, here, low, tile.end - origin, pages)
    # What is multiplied goes on up to the last part's end, which may be after the tile's.
    offset = origin - tile.begin
    count = jnp.minimum(parts * layout.row_tokens - offset, pages.block_tokens)
    split_kv(ref.buffer, slot, count, ref.words, ref.keys, ref.values, layout)
    _attend_block(ref, layout, options, tile, parts, offset)


def _attend_block(
    ref: _Refs, layout: PrefillLayout, options: Options, tile: _Tile, parts: jax.Array,
    offset: jax.Array,
) -> None:  # fmt: skip
    """The tile's parts with a block whose first key is `offset` tokens after the first query.

    Parts that see the first keys of the block only are not multiplied by the others.
    """
    tokens, block = layout.row_tokens, layout.pages.block_tokens
    reach = offset + (block - 1)
    low = divide(jnp.maximum(offset, 0), tokens)
    whole = jnp.clip(divide(jnp.maximum(reach, 0) + (tokens - 1), tokens), low, parts)
    high = parts
    if options.window is not None:
        high = jnp.minimum(high, divide(reach + options.window + (tokens - 1), tokens))
        whole = jnp.where(tile.length - 1 - options.window >= offset, high, whole)
    pair = layout.pair_parts
    low, whole, high = low & -pair, (whole + pair - 1) & -pair, (high + pair - 1) & -pair
    for keys in range(layout.width_step, block, layout.width_step):
        stop = divide(jnp.maximum(offset + keys, 0), tokens) & -pair
        stop = jnp.clip(stop, low, whole)
        _attend(ref, layout, options, low, stop, offset, keys, masked=True)
        low = stop
    _attend(ref, layout, options, low, whole, offset, block, masked=True)
    _attend(ref, layout, options, whole, high, offset, block, masked=False)


def _attend(
    ref: _Refs, layout: PrefillLayout, options: Options, low: jax.Array, high: jax.Array,
    offset: jax.Array, num_keys: int, masked: bool,
) -> None:  # fmt: skip
    """Parts [low, high) of the tile and all heads with the first keys of the block.

    While the weights of one product are computed, so are the scores of the next, piece by piece of
    their rows: what is alive at a time has to fit registers.
    """
    rows, heads, unroll = layout.rows, layout.kv_heads, layout.unroll
    turns = divide((high - low) * heads, unroll)

    def locate(i: jax.Array, n: int) -> tuple[jax.Array, Any]:
        """Head and rows of product n of turn i."""
        if layout.pair_parts == 2:
            return modulo(i, heads), low + 2 * divide(i, heads) + n
        per_part = heads // unroll
        return unroll * modulo(i, per_part) + n, low + divide(i, per_part)

    def compute(i: jax.Array, n: int, lanes: slice) -> None:
        head, part = locate(i, n)
        width, keys = lanes.stop - lanes.start, layout.seen_keys(num_keys, lanes.stop)
        at = pl.ds(pl.multiple_of(part * rows + lanes.start, width), width)
        scores = lax.dot_general(
            ref.keys[head, :keys], ref.queries[head, at], (((1,), (1,)), ((), ())),
            precision=precision(ref.keys.dtype), preferred_element_type=F32,
        )  # fmt: skip
        if options.softcap is not None:
            scores = jnp.tanh(scores) * (options.softcap * LOG2E)
        if masked:
            # Without a window all queries see the first keys: narrower products would do otherwise.
            sure = 0 if options.window is not None else layout.sure_keys(num_keys, lanes.start)
            first = divide(part * rows + lanes.start, layout.groups) - offset - sure
            mask = _seen((keys - sure, width), layout, options, first)
            edge = jnp.where(mask, scores[sure:], LOWEST)
            scores = jnp.concatenate([scores[:sure], edge], 0) if sure else edge
        old = ref.highest[head, part, :, lanes]
        new = jnp.maximum(old, jnp.max(scores, axis=0, keepdims=True))
        ref.scores[n % 2, :keys, lanes] = scores
        ref.highest[head, part, :, lanes] = new
        # `_add` reads these and not `highest`, which the next `compute` changes: it need not wait.
        ref.change[n % 2, 0, :, lanes], ref.change[n % 2, 1, :, lanes] = new, jnp.exp2(old - new)

    @pl.when(turns > 0)
    def _() -> None:
        for lanes in layout.row_pieces:
            compute(jnp.int32(0), 0, lanes)

    def do_turn(i: jax.Array, _: None) -> None:
        for n in range(unroll):
            for lanes in layout.row_pieces:
                if n + 1 < unroll:
                    compute(i, n + 1, lanes)
                else:
                    compute(jnp.minimum(i + 1, turns - 1), 0, lanes)
                _add(ref, *locate(i, n), n % 2, layout.seen_keys(num_keys, lanes.stop), lanes)

    lax.fori_loop(0, turns, do_turn, None)


def _seen(
    shape: tuple[int, ...], layout: PrefillLayout, options: Options, first: jax.Array
) -> jax.Array:
    """bool[keys, rows]: which keys queries see; the first is as many tokens after the first key."""
    shift = layout.groups.bit_length() - 1
    row = lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1)
    query = (row >> shift) + first
    key = lax.broadcasted_iota(jnp.int32, shape, 0)
    seen = key <= query
    return seen if options.window is None else seen & (key > query - options.window)


def _add(ref: _Refs, head: jax.Array, part: jax.Array, which: int, keys: int, lanes: slice) -> None:
    """Adds the block's first keys to the softmax of a piece of the rows of a head."""
    highest, rescale = ref.change[which, 0, :, lanes], ref.change[which, 1, :, lanes]
    weights = jnp.exp2(ref.scores[which, :keys, lanes] - highest)
    values = ref.values[head, :, :keys]
    added = lax.dot_general(
        values, weights.astype(values.dtype), (((1,), (0,)), ((), ())),
        precision=precision(values.dtype), preferred_element_type=F32,
    )  # fmt: skip
    sums = ref.sums[head, part, :, lanes] * rescale
    ref.sums[head, part, :, lanes] = sums + added[: sums.shape[0]]
