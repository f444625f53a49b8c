"""Attention of decode rows on TPU, which reads pages where they lie, one copy per page.

Nothing is transposed or gathered. A page [G, 2K, H] is seen as W rows of L <= 128 lanes in the
order in which TPU memory holds them already (`tpu_layout.as_rows`; the compiler makes it a
bitcast). For H = 256 the rows of a token are, tile by tile, the left halves of K0, V0, K1, V1, ...
and then the right halves. The kernel multiplies the queries of all heads by the rows of a block at
once and masks the columns that are not a K of the query's own head: K times the scores needed, on
units that a decode step leaves idle, where taking the heads apart would cost more than it saves.

Letters: T tokens, S rows, N query heads (a multiple of 8 here), K KV heads, H head dim, P pages,
G page size, M table width, R = 2K, C = H / L chunks of a head, W = G * R * C rows of a page,
B pages of a block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuning
from pallas_kernels.paged_attention.tpu_copies import clear_unseen, forget, start_block, wait_block
from pallas_kernels.paged_attention.tpu_layout import (
    F32,
    LANES,
    LOG2E,
    LOWEST,
    Layout,
    Options,
    as_rows,
    divide,
    modulo,
    operand,
    pages_seen,
    precision,
)
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import ArrayFacts

SLOTS = 4  # blocks in VMEM: one in use, the others on their way
ROWS_PER_STEP = 8  # sequences per grid step
VMEM_FREE = 14 << 20  # of the 16 MiB that every chip gives without being asked
VMEM_SPILLS = 8 << 20


def vmem_bytes(
    q: jax.Array | ArrayFacts,
    pages: jax.Array | ArrayFacts,
    table: jax.Array | ArrayFacts,
    kv_heads: int,
    window: int | None,
) -> int:
    """What the decode kernel needs, rounded up."""
    layout = _layout(q, pages, table, kv_heads, window)
    heads = -(-q.shape[1] // 8) * 8
    item = jnp.dtype(pages.dtype).itemsize
    buffers = SLOTS * layout.block_rows * LANES * item
    # The scores' bias; scores, weights and their rolled copies for every chunk.
    scores = heads * layout.columns * (4 + 4 + 2 * item * layout.chunks)
    queries = 4 * ROWS_PER_STEP * heads * layout.chunks * LANES * item
    needed = buffers + scores + queries
    return needed if needed <= VMEM_FREE else needed + VMEM_SPILLS


def _layout(
    q: jax.Array | ArrayFacts,
    pages: jax.Array | ArrayFacts,
    table: jax.Array | ArrayFacts,
    kv_heads: int,
    window: int | None,
) -> Layout:
    """With the block that was tuned: `Layout.of` has the largest, and smaller ones start sooner."""
    layout = Layout.of(pages, kv_heads, table.shape[1], window)
    most, quantum = layout.block, layout.pages_per_chunk
    smaller = {-(-most // (parts * quantum)) * quantum for parts in (2, 4)}
    blocks = sorted({most, *(block for block in smaller if block < most)})
    heads = -(-q.shape[1] // 8) * 8
    shape = heads, *pages.shape[1:], jnp.dtype(pages.dtype).itemsize, window or 0, most
    block = tuning.pick("paged_attention.decode_pages", shape, blocks, most)
    return layout._replace(block=block)


def decode(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    ragged: RaggedBatch,
    sinks: jax.Array | None,
    options: Options,
    *,
    interpret: Any = False,
) -> jax.Array:
    """Attention of the decode rows: q [S, N, H] -> [S, N, H], 0 for other rows."""
    rows, heads, dim = q.shape
    layout = _layout(q, pages, table, options.kv_heads, options.window)
    groups = heads // options.kv_heads
    padded, step = -(-heads // 8) * 8, min(ROWS_PER_STEP, rows)
    q = jnp.pad(q, ((0, -rows % step), (0, padded - heads), (0, 0)))
    logits = jnp.zeros(heads, F32) if sinks is None else sinks.astype(F32) * LOG2E
    logits = jnp.broadcast_to(jnp.pad(logits, (0, padded - heads))[:, None], (padded, LANES))
    per_step = pl.BlockSpec((step, padded, dim), lambda i, *_: (i, 0, 0))
    block = (layout.block, layout.page_rows, layout.lanes)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(q.shape[0] // step,),
        in_specs=[
            per_step,
            pl.BlockSpec((padded, LANES), lambda i, *_: (0, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=per_step,
        scratch_shapes=[
            pltpu.VMEM((SLOTS, *block), pages.dtype),
            pltpu.VMEM((padded, layout.columns), F32),
            pltpu.VMEM((8, layout.columns), jnp.int32),
            pltpu.SMEM((3,), jnp.int32),
            pltpu.SMEM((SLOTS,), jnp.int32),
            pltpu.SemaphoreType.DMA((SLOTS,)),
        ],
    )
    vmem = vmem_bytes(q, pages, table, options.kv_heads, options.window)
    kernel = functools.partial(
        _decode_kernel, layout=layout, options=options, groups=groups, width=table.shape[1]
    )
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=grid_spec,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,  # of copies: each costs as much as its start
            vmem_limit_bytes=vmem if vmem > VMEM_FREE else None,
        ),
        interpret=interpret,
        name="paged_attention_decode",
    )
    out = call(table.reshape(-1), ragged.seq_lens, ragged.counts, q, logits, as_rows(pages, layout))
    return out[:rows, :heads]


def _decode_kernel(
    table: Any, seq_lens: Any, counts: Any, q_ref: Any, sinks: Any, pages: Any, out: Any,
    buffer: Any, bias: Any, token: Any, cursor: Any, filled: Any, sems: Any, *,
    layout: Layout, options: Options, groups: int, width: int,
) -> None:  # fmt: skip
    """One grid step: some rows, block by block.

    `cursor` lives across steps: row and block of the next copy to start, and the number of blocks
    used so far. Block i of all rows together uses slot i % SLOTS. So does `filled`, see
    `wait_block`.
    """
    step_rows = q_ref.shape[0]
    size, per_block = layout.page_size, layout.block
    padded = q_ref.shape[1]
    num_rows = counts[0]
    step = pl.program_id(0)  # here: the interpreters do not know it inside a loop

    def bounds(row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of a row: first logical page that it sees, pages from there on, length."""
        end = seq_lens[row]
        if options.window is None:
            first = jnp.int32(0)
        else:
            first = divide(jnp.maximum(end - options.window, 0), size)
        return first, divide(end + (size - 1), size) - first, end

    def blocks_of(count: jax.Array) -> jax.Array:
        if options.window is None:
            return divide(count + (per_block - 1), per_block)
        most = min(pages_seen(options.window, size), width)
        return functools.reduce(
            jnp.add, [(count > n).astype(jnp.int32) for n in range(0, most, per_block)]
        )

    def start_next(number: jax.Array) -> None:
        """Starts the copies of the block at the cursor into the slot of block `number`."""
        row, index = cursor[0], cursor[1]
        slot = modulo(number, SLOTS)

        @pl.when(row < num_rows)
        def _() -> None:
            first, count = bounds(row)[:2]
            done = index * per_block
            start_block(
                pages, table, buffer, sems, slot, row * width, first + done, count - done,
                layout, width, ring=options.window is not None,
            )  # fmt: skip
            last = done + per_block >= count
            cursor[0] = jnp.where(last, row + 1, row)
            cursor[1] = jnp.where(last, 0, index + 1)

    @pl.when(step == 0)
    def _() -> None:
        cursor[0] = 0
        cursor[1] = 0
        cursor[2] = 0
        for i in range(SLOTS - 1):
            start_next(jnp.int32(i))
        forget(filled, layout)
        _fill_masks(bias, token, layout, groups)

    out[...] = jnp.zeros(out.shape, out.dtype)

    def do_row(r: jax.Array, _: None) -> None:
        row = step * step_rows + r
        first, count, end = bounds(row)
        queries = _chunked(q_ref[r].astype(F32), layout).astype(q_ref.dtype)
        begin = jnp.int32(0) if options.window is None else jnp.maximum(end - options.window, 0)

        def do_block(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            number = cursor[2]
            slot = modulo(number, SLOTS)
            cursor[2] = number + 1
            start_next(number + SLOTS - 1)
            here = jnp.minimum(count - i * per_block, per_block)

            wait_block(buffer, filled, sems, slot, here, layout)

            # Visible tokens of this block, counted from its first.
            origin = (first + i * per_block) * size
            low, high = begin - origin, end - origin
            clear_unseen(buffer, slot, here, low, high, layout)

            scores, values = [], []
            for at in range(0, layout.block_rows, layout.chunk_rows):
                keys, value_rows = _keys_and_values(buffer, slot, at, layout)
                start, stop = (x // layout.column_rows for x in (at, at + layout.chunk_rows))
                hidden = bias[:, start:stop] + _unseen(token[0:1, start:stop], low, high)
                scores.append(_scores(queries, keys, layout, options) + hidden)
                values.append(value_rows)
            highest, total, sums = state
            new = functools.reduce(jnp.maximum, [highest, *map(_highest, scores)])
            rescale = jnp.exp2(highest - new)
            total, sums = total * rescale, sums * jnp.concatenate([rescale] * layout.chunks, 0)
            for score, value_rows in zip(scores, values, strict=True):
                weights = jnp.exp2(score - new)
                total += jnp.sum(weights, axis=1, keepdims=True)
                sums += _weighted(weights, value_rows, layout)
            return new, total, sums

        if options.sinks:
            highest, total = sinks[:, 0:1], jnp.ones((padded, 1), F32)
        else:
            highest = jnp.full((padded, 1), LOWEST, F32)
            total = jnp.zeros((padded, 1), F32)
        values = jnp.zeros((layout.chunks * padded, layout.lanes), F32)
        blocks = blocks_of(count)
        state = lax.fori_loop(0, blocks, do_block, (highest, total, values))
        _, total, values = state
        for c in range(layout.chunks):
            part = values[c * padded : (c + 1) * padded] / total
            out[r, :, c * layout.lanes : (c + 1) * layout.lanes] = part.astype(out.dtype)

    here = jnp.clip(num_rows - step * step_rows, 0, step_rows)
    lax.fori_loop(0, here, do_row, None)


def _fill_masks(bias: Any, token: Any, layout: Layout, groups: int) -> None:
    """`bias` [N, rows]: 0 where a row is the first chunk of the K of head n, LOWEST elsewhere.

    `token` [8, rows]: the token that a row belongs to, counted from the first of the block.
    """

    def divide(x: jax.Array, by: int) -> jax.Array:
        # There is no integer division of vectors; this is exact below 2^22.
        return jnp.floor((x.astype(F32) + 0.5) * (1.0 / by)).astype(jnp.int32)

    column = lax.broadcasted_iota(jnp.int32, token.shape, 1)
    token[...] = divide(column, layout.token_columns)
    head = divide(lax.broadcasted_iota(jnp.int32, bias.shape, 0), groups)
    column = lax.broadcasted_iota(jnp.int32, bias.shape, 1)
    tile, group = layout.chunk_columns, layout.chunk_columns * layout.chunks
    within = column - divide(column, layout.token_columns) * layout.token_columns
    which = divide(within, group)  # tile of the token
    within = within - which * group
    chunk = divide(within, tile)
    key = which * tile + within - chunk * tile
    first = head if layout.shared or layout.packing == 2 else head * 2
    bias[...] = jnp.where((chunk == 0) & (key == first), 0.0, LOWEST)


def _keys_and_values(
    buffer: Any, slot: jax.Array, at: int, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """`chunk_rows` rows of a block from row `at`, as K and as V.

    A K of 16 bits shares its words with its V: apart, they are half as many rows each. In 32 bits,
    or if they share rows, both are all the rows.
    """
    page, within = divmod(at, layout.page_rows)
    if layout.chunk_rows < layout.page_rows:
        rows = buffer[slot, page, within : within + layout.chunk_rows]
    else:
        pages = layout.chunk_rows // layout.page_rows
        rows = buffer[slot, page : page + pages].reshape(layout.chunk_rows, layout.lanes)
    if layout.column_rows == 1:
        return operand(rows), operand(rows)
    words = pltpu.bitcast(rows, jnp.uint32)
    if rows.dtype.itemsize == 1:
        convert = _int8 if rows.dtype == jnp.int8 else _float8
        return convert(words << 8), convert(words)
    keys, values = words << 16, words & jnp.uint32(0xFFFF0000)
    keys, values = (pltpu.bitcast(x, F32).astype(rows.dtype) for x in (keys, values))
    return keys, values


def _float8(words: jax.Array) -> jax.Array:
    """Bytes 1 and 3 of words, float8_e4m3fn, as a row of bfloat16 each; its NaN becomes 480.

    Half the instructions of a conversion, which would take K and V apart only afterwards.
    """
    # From 2^-6 on, magnitudes are those of bfloat16 but for the exponent's bias of 7, not 127.
    normal = pltpu.bitcast(((words >> 4) & 0x07F007F0) + 0x3C003C00, jnp.bfloat16)
    # Below, this gave 2^-7 (1 + m / 8) for m / 8 * 2^-6.
    size = jnp.minimum(normal, normal + (normal - jnp.bfloat16(2**-6)))
    return pltpu.bitcast(
        pltpu.bitcast(size, jnp.uint32) | (words & jnp.uint32(0x80008000)), jnp.bfloat16
    )


def _int8(words: jax.Array) -> jax.Array:
    """Bytes 1 and 3 of words, int8, as a row of bfloat16 each."""
    # From 128 to 256 bfloat16 goes by ones: 128 plus the low 7 bits, less 128 or, if negative, 256.
    bits = words >> 8
    size = pltpu.bitcast((bits & 0x007F007F) | 0x43004300, jnp.bfloat16)
    return size - pltpu.bitcast((bits & 0x00800080) | 0x43004300, jnp.bfloat16)


def _unseen(token: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """LOWEST where `token` is outside [low, high), else 0."""
    return jnp.where((token >= low) & (token < high), 0.0, LOWEST)


def _highest(scores: jax.Array) -> jax.Array:
    return jnp.max(scores, axis=1, keepdims=True)


def _roll(x: jax.Array, by: int, layout: Layout) -> jax.Array:
    """Rolls columns; where it can, within vectors of lanes. No token lies across two of them."""
    width = x.shape[1] if LANES % layout.token_columns or x.shape[1] % LANES else LANES
    parts = [x[:, i : i + width] for i in range(0, x.shape[1], width)]
    return jnp.concatenate([pltpu.roll(part, by % width, 1) for part in parts], 1)


def _chunked(x: jax.Array, layout: Layout) -> jax.Array:
    """[N, H] -> [C * N, L]."""
    lanes = layout.lanes
    return jnp.concatenate([x[:, c * lanes : (c + 1) * lanes] for c in range(layout.chunks)], 0)


def _scores(queries: jax.Array, rows: jax.Array, layout: Layout, options: Options) -> jax.Array:
    """Scores in units of log 2, [N, rows]: right in the columns of first chunks of Ks."""
    products = lax.dot_general(
        queries, rows, (((1,), (1,)), ((), ())),
        precision=precision(rows.dtype), preferred_element_type=F32,
    )  # fmt: skip
    padded = queries.shape[0] // layout.chunks
    scores = products[:padded]
    for c in range(1, layout.chunks):
        other = products[c * padded : (c + 1) * padded]
        scores += _roll(other, -c * layout.chunk_columns, layout)
    if options.softcap is None:
        return scores * (options.scale * LOG2E)
    return jnp.tanh(scores * (options.scale / options.softcap)) * (options.softcap * LOG2E)


def _weighted(weights: jax.Array, rows: jax.Array, layout: Layout) -> jax.Array:
    """Sums of V [C * N, L], by weights [N, rows] in the columns of first chunks of Ks."""
    # The chunk c of a V lies c tiles after the first of its K, and one row if that is another one.
    first = 0 if layout.shared or layout.packing == 2 else 1
    shifts = [first + c * layout.chunk_columns for c in range(layout.chunks)]
    moved = [_roll(weights, by, layout) if by else weights for by in shifts]
    moved = jnp.concatenate(moved, 0).astype(rows.dtype)
    return lax.dot_general(
        moved, rows, (((1,), (0,)), ((), ())),
        precision=precision(rows.dtype), preferred_element_type=F32,
    )  # fmt: skip
