"""Paged attention on TPU: kernels that read pages where they lie, one copy per page.

Nothing is transposed or gathered. A page [G, 2K, H] is seen as W rows of L <= 128 lanes in the order
in which TPU memory holds them already (`_as_rows`; the compiler makes it a bitcast). For H = 256 the
rows of a token are, tile by tile, the left halves of K0, V0, K1, V1, ... and then the right halves.
The decode kernel multiplies the queries of all heads by all rows of a block at once and masks the
columns that are not a K of the query's own head. That computes 2K times the scores needed, on units
that a decode step leaves idle; taking K and V apart first would cost more than it saves. A weight
stands in the column of its K; its V is one column further, hence `roll`.

Letters: T tokens, S rows, N query heads (a multiple of 8 here), K KV heads, H head dim, P pages, G page
size, M table width, R = 2K, C = H / L chunks of a head, W = G * R * C rows of a page, B pages of a block.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import ArrayFacts, Facts

F32 = jnp.float32
LOWEST = -1e30
LANES = 128
LOG2E = math.log2(math.e)
SLOTS = 4  # blocks in VMEM: one in use, the others on their way
BLOCK_ROWS = 4096  # rows of L lanes per block; larger blocks make tails dearer
BLOCK_TOKENS = 512
ROWS_PER_STEP = 8  # sequences per grid step
VMEM_LIMIT = 14 << 20  # the smallest chip has 16 MiB
SMEM_LIMIT = 768 << 10  # of 1 MiB


class Layout(NamedTuple):
    """How a page lies in memory, and how many make a block. Static."""

    page_size: int
    kv_rows: int  # R
    dim: int  # H
    tile: int  # rows of a token that lie together before the next chunk
    chunks: int  # C
    lanes: int  # L
    block: int  # B

    @classmethod
    def of(cls, pages: tuple[int, ...], table_width: int) -> "Layout":
        """Of pages [P, G, 2K, H]."""
        _, size, rows, dim = pages
        chunks = dim // LANES if dim > LANES else 1
        tokens = min(BLOCK_TOKENS, BLOCK_ROWS // (rows * chunks))
        block = min(max(tokens // size, 1), table_width)
        return cls(size, rows, dim, min(rows, 8), chunks, dim // chunks, block)

    @property
    def token_rows(self) -> int:
        """Rows of one token."""
        return self.kv_rows * self.chunks

    @property
    def page_rows(self) -> int:
        """W."""
        return self.page_size * self.token_rows

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.block * self.page_rows

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.block * self.page_size


class Options(NamedTuple):
    """The static options of a call."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: bool


def refuses(facts: Facts) -> str | None:
    """Why this implementation cannot run, or None."""
    if facts.platform != "tpu":
        return f"is for TPU, not {facts.platform}"
    return refuses_shapes(facts)


def refuses_shapes(facts: Facts) -> str | None:
    """Why the operands do not fit, whatever the platform, or None."""
    q, pages, table = (facts.values[name] for name in ("q", "pages", "table"))
    if pages.dtype not in ("bfloat16", "float32"):
        return f"pages must be bfloat16 or float32, not {pages.dtype}"
    if q.dtype != pages.dtype:
        return f"q is {q.dtype} and pages are {pages.dtype}; they must be equal"
    if not facts.values["decode_only"]:
        return "has no prefill yet, and the batch may have prefill rows"
    _, size, rows, dim = pages.shape
    if dim > LANES and dim % LANES:
        return f"head dim {dim} is above {LANES} and no multiple of it"
    if rows not in (2, 4) and rows % 8:
        return f"{rows // 2} KV heads: K and V of a token ({rows} rows) are not whole tiles of 8 rows"
    packing = 4 // jnp.dtype(pages.dtype).itemsize
    if size * rows * max(dim // LANES, 1) % (8 * packing):
        return f"a page of {size} tokens is not whole tiles of {8 * packing} rows"
    if (needed := 4 * table.shape[0] * table.shape[1]) > SMEM_LIMIT:
        return f"the table needs {needed >> 10} KiB of scalar memory, of {SMEM_LIMIT >> 10}"
    if (needed := _vmem_bytes(q, pages, table)) > VMEM_LIMIT:
        return f"blocks need {needed >> 20} MiB of vector memory, of {VMEM_LIMIT >> 20}"
    return None


def _vmem_bytes(q: ArrayFacts, pages: ArrayFacts, table: ArrayFacts) -> int:
    layout = Layout.of(pages.shape, table.shape[1])
    heads = -(-q.shape[1] // 8) * 8
    item = jnp.dtype(pages.dtype).itemsize
    rows = layout.block_rows
    buffers = SLOTS * rows * LANES * item
    # The scores' bias; scores, weights and their rolled copies for every chunk.
    scores = heads * rows * (4 + 4 + 2 * 4 * layout.chunks)
    queries = 4 * ROWS_PER_STEP * heads * layout.chunks * LANES * item
    return buffers + scores + queries


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
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.paged_attention`; `interpret` as in `pl.pallas_call`."""
    options = Options(scale, window, softcap, sinks is not None)
    pages = write(k, v, pages, table, ragged, interpret=interpret)
    out = decode(q, pages, table, ragged, sinks, options, interpret=interpret)
    return out, pages


def write(
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    ragged: RaggedBatch,
    *,
    interpret: Any = False,
) -> jax.Array:
    """Puts K and V [T, K, H] of the decode rows into `pages`, in place."""
    kv = jnp.stack([k, v], axis=2).reshape(k.shape[0], 2 * k.shape[1], k.shape[2])
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(1,),
        in_specs=[anywhere, anywhere],
        out_specs=anywhere,
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )
    kernel = functools.partial(_write_kernel, page_size=pages.shape[1], width=table.shape[1])
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        grid_spec=grid_spec,
        input_output_aliases={4: 0},
        interpret=interpret,
        name="paged_attention_write",
    )
    return call(
        table.reshape(-1), ragged.seq_lens, ragged.counts, kv.astype(pages.dtype), pages
    )


def _write_kernel(
    table: Any, seq_lens: Any, counts: Any, kv: Any, _: Any, pages: Any, sem: Any, *,
    page_size: int, width: int,
) -> None:  # fmt: skip
    def copy(row: jax.Array) -> Any:
        position = seq_lens[row] - 1
        column = lax.rem(lax.div(position, page_size), width)
        page = table[row * width + column]
        offset = lax.rem(position, page_size)
        return pltpu.make_async_copy(kv.at[row], pages.at[page, offset], sem)

    def start(row: jax.Array, _: None) -> None:
        copy(row).start()

    def wait(row: jax.Array, _: None) -> None:
        copy(row).wait()

    lax.fori_loop(0, counts[0], start, None)
    lax.fori_loop(0, counts[0], wait, None)


def _as_rows(pages: jax.Array, layout: Layout) -> jax.Array:
    """Pages [P, G, R, H] as [P, W, L], in the order in which TPU memory holds them."""
    count, tile, chunks = pages.shape[0], layout.tile, layout.chunks
    tiles = layout.kv_rows // tile
    cut = pages.reshape(count, layout.page_size, tiles, tile, chunks, layout.lanes)
    cut = cut.transpose(0, 1, 2, 4, 3, 5)
    return cut.reshape(count, layout.page_rows, layout.lanes)


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
    layout = Layout.of(pages.shape, table.shape[1])
    groups = heads // (pages.shape[2] // 2)
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
            pltpu.VMEM((padded, layout.block_rows), F32),
            pltpu.VMEM((8, layout.block_rows), jnp.int32),
            pltpu.SMEM((3,), jnp.int32),
            pltpu.SemaphoreType.DMA((SLOTS,)),
        ],
    )
    kernel = functools.partial(
        _decode_kernel, layout=layout, options=options, groups=groups, width=table.shape[1]
    )
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=grid_spec,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_attention_decode",
    )
    out = call(
        table.reshape(-1), ragged.seq_lens, ragged.counts, q, logits, _as_rows(pages, layout)
    )
    return out[:rows, :heads]


def _decode_kernel(
    table: Any, seq_lens: Any, counts: Any, q_ref: Any, sinks: Any, pages: Any, out: Any,
    buffer: Any, bias: Any, token: Any, cursor: Any, sems: Any, *,
    layout: Layout, options: Options, groups: int, width: int,
) -> None:  # fmt: skip
    """One grid step: some rows, block by block.

    `cursor` lives across steps: row and block of the next copy to start, and the number of blocks
    used so far. Block i of all rows together uses slot i % SLOTS.
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
            first = lax.div(jnp.maximum(end - options.window, 0), size)
        return first, lax.div(end + (size - 1), size) - first, end

    def start_next(number: jax.Array) -> None:
        """Starts the copies of the block at the cursor into the slot of block `number`."""
        row, index = cursor[0], cursor[1]
        slot = lax.rem(number, SLOTS)

        @pl.when(row < num_rows)
        def _() -> None:
            first, count, _ = bounds(row)
            done = index * per_block
            base = row * width
            column = first + done
            if options.window is not None:
                column = lax.rem(column, width)

            def start(i: int | jax.Array) -> None:
                at = column + i
                if options.window is not None:
                    at = jnp.where(at >= width, at - width, at)
                pltpu.make_async_copy(
                    pages.at[table[base + at]], buffer.at[slot, i], sems.at[slot]
                ).start()

            @pl.when(count - done >= per_block)
            def _() -> None:
                for i in range(per_block):
                    start(i)

            @pl.when(count - done < per_block)
            def _() -> None:
                lax.fori_loop(0, count - done, lambda i, _: start(i), None)

            last = done + per_block >= count
            cursor[0] = jnp.where(last, row + 1, row)
            cursor[1] = jnp.where(last, 0, index + 1)

    @pl.when(step == 0)
    def _() -> None:
        cursor[0] = 0
        cursor[1] = 0
        cursor[2] = 0
        # What no copy has filled yet is multiplied by zero: it must be finite.
        buffer[...] = jnp.zeros(buffer.shape, buffer.dtype)
        _fill_masks(bias, token, layout, groups)
        for i in range(SLOTS - 1):
            start_next(jnp.int32(i))

    out[...] = jnp.zeros(out.shape, out.dtype)

    def do_row(r: jax.Array, _: None) -> None:
        row = step * step_rows + r
        first, count, end = bounds(row)
        queries = _chunked(q_ref[r].astype(F32), layout).astype(buffer.dtype)
        begin = jnp.int32(0) if options.window is None else jnp.maximum(end - options.window, 0)

        def do_block(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            number = cursor[2]
            slot = lax.rem(number, SLOTS)
            cursor[2] = number + 1
            start_next(number + SLOTS - 1)
            here = jnp.minimum(count - i * per_block, per_block)

            @pl.when(here == per_block)
            def _() -> None:
                pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], sems.at[slot]).wait()

            @pl.when(here < per_block)
            def _() -> None:
                def wait(j: jax.Array, _: None) -> None:
                    pltpu.make_async_copy(
                        buffer.at[slot, j], buffer.at[slot, j], sems.at[slot]
                    ).wait()

                lax.fori_loop(0, here, wait, None)

            # Visible tokens of this block, counted from its first.
            origin = (first + i * per_block) * size
            low, high = begin - origin, end - origin
            for page, cut in ((0, low > 0), (here - 1, high < here * size)):

                @pl.when(cut)
                def _(page: int | jax.Array = page) -> None:
                    _clear_unseen(buffer, slot, page, low, high, layout)

            rows = buffer[slot].reshape(layout.block_rows, layout.lanes)
            scores = _scores(queries, rows, layout, options) + bias[...]
            edge = jnp.logical_or(low > 0, high < layout.block_tokens)

            def mask(scores: jax.Array) -> jax.Array:
                seen = (token[0:1] >= low) & (token[0:1] < high)
                return jnp.where(seen, scores, LOWEST)

            scores = lax.cond(edge, mask, lambda scores: scores, scores)
            return _accumulate(state, scores, rows, layout)

        if options.sinks:
            highest, total = sinks[:, 0:1], jnp.ones((padded, 1), F32)
        else:
            highest = jnp.full((padded, 1), LOWEST, F32)
            total = jnp.zeros((padded, 1), F32)
        values = jnp.zeros((layout.chunks * padded, layout.lanes), F32)
        blocks = lax.div(count + (per_block - 1), per_block)
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
    token[...] = divide(column, layout.token_rows)
    head = divide(lax.broadcasted_iota(jnp.int32, bias.shape, 0), groups)
    column = lax.broadcasted_iota(jnp.int32, bias.shape, 1)
    tile, group = layout.tile, layout.tile * layout.chunks
    within = column - divide(column, layout.token_rows) * layout.token_rows
    which = divide(within, group)  # tile of the token
    within = within - which * group
    chunk = divide(within, tile)
    kv_row = which * tile + within - chunk * tile
    bias[...] = jnp.where((chunk == 0) & (kv_row == 2 * head), 0.0, LOWEST)


def _chunked(x: jax.Array, layout: Layout) -> jax.Array:
    """[N, H] -> [C * N, L]."""
    lanes = layout.lanes
    return jnp.concatenate([x[:, c * lanes : (c + 1) * lanes] for c in range(layout.chunks)], 0)


def _clear_unseen(
    buffer: Any, slot: jax.Array, page: int | jax.Array, low: jax.Array, high: jax.Array,
    layout: Layout,
) -> None:  # fmt: skip
    """Zeroes the rows of one page of a block outside tokens [low, high): they may be NaN."""
    shape = (layout.page_rows, layout.lanes)
    row = lax.broadcasted_iota(jnp.int32, shape, 0) + page * layout.page_rows
    seen = (row >= low * layout.token_rows) & (row < high * layout.token_rows)
    kept = jnp.where(seen, buffer[slot, page].astype(F32), 0.0)
    buffer[slot, page] = kept.astype(buffer.dtype)


def _precision(dtype: Any) -> lax.Precision | None:
    return lax.Precision.HIGHEST if dtype == F32 else None


def _scores(queries: jax.Array, rows: jax.Array, layout: Layout, options: Options) -> jax.Array:
    """Scores in units of log 2, [N, rows]: right in the columns of first chunks of Ks."""
    products = lax.dot_general(
        queries, rows, (((1,), (1,)), ((), ())),
        precision=_precision(rows.dtype), preferred_element_type=F32,
    )  # fmt: skip
    padded = queries.shape[0] // layout.chunks
    scores = products[:padded]
    for c in range(1, layout.chunks):
        other = products[c * padded : (c + 1) * padded]
        scores += pltpu.roll(other, other.shape[1] - c * layout.tile, 1)
    if options.softcap is None:
        return scores * (options.scale * LOG2E)
    return jnp.tanh(scores * (options.scale / options.softcap)) * (options.softcap * LOG2E)


def _accumulate(
    state: tuple[jax.Array, ...], scores: jax.Array, rows: jax.Array, layout: Layout
) -> tuple[jax.Array, ...]:
    """One block of the online softmax."""
    highest, total, values = state
    new = jnp.maximum(highest, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - new)
    rescale = jnp.exp2(highest - new)
    total = total * rescale + jnp.sum(weights, axis=1, keepdims=True)
    # The chunk c of a V lies c tiles and one row after the first chunk of its K.
    moved = [pltpu.roll(weights, 1 + c * layout.tile, 1) for c in range(layout.chunks)]
    moved = jnp.concatenate(moved, 0).astype(rows.dtype)
    added = lax.dot_general(
        moved, rows, (((1,), (0,)), ((), ())),
        precision=_precision(rows.dtype), preferred_element_type=F32,
    )  # fmt: skip
    return new, total, values * jnp.concatenate([rescale] * layout.chunks, 0) + added
