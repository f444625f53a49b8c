"""Decode of paged attention on GPUs: a Triton kernel per row, KV head and part of the context.

The kernel also puts the step's K and V into the pages. It never reads them back: the first part
takes them from the operands, so the parts need not wait for each other. Letters beyond
`reference.py`'s: D is H and Q is R, up to what tiles allow; B tokens of context per iteration.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import gpu_chip, storage, tuning
from pallas_kernels.paged_attention.pages import nothing
from pallas_kernels.paged_attention.reference import LOWEST, Options
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import ArrayFacts

F32 = jnp.float32
LOG2_E = math.log2(math.e)
TILE = 16  # rows, columns and depth of a product at least
STAGES = 3  # table, K and V, products
BLOCK_BYTES = 32 << 10  # of K and V; several programs share a multiprocessor, to hide latencies
BLOCK_TOKENS = 128
MAX_PARTS = 32


class Tiles(NamedTuple):
    """Sizes of what a program holds. Static."""

    group: int  # R
    heads: int  # Q
    dim: int  # D
    block: int  # B
    parts: int  # of a row's context, taken by a program each

    @classmethod
    def of(
        cls,
        q: jax.Array | ArrayFacts,
        pages: jax.Array | ArrayFacts,
        table: jax.Array | ArrayFacts,
        window: int | None,
    ) -> "Tiles":
        """For q [T, N, H], pages [P, G, 2K, H] and table [S, M]."""
        _, heads, head_dim = q.shape
        rows, width = table.shape
        kv_heads = pages.shape[2] // 2
        dim = max(gpu_chip.power_of_two(head_dim), TILE)
        token = 2 * dim * jnp.dtype(q.dtype).itemsize  # what pages hold is converted
        context = min(width * pages.shape[1], window or width * pages.shape[1])
        shape = rows, heads, kv_heads, head_dim, context
        most = max(min(BLOCK_TOKENS, BLOCK_BYTES // token), TILE)
        sizes = gpu_chip.powers(TILE, most)
        block = tuning.pick("paged_attention.block", shape, sizes, sizes[-1])
        most = min(gpu_chip.power_of_two(-(-context // (2 * block))), MAX_PARTS)
        wanted = gpu_chip.power_of_two(-(-gpu_chip.PROGRAMS // (rows * kv_heads)))
        sizes = gpu_chip.powers(1, most)
        parts = tuning.pick("paged_attention.parts", shape, sizes, min(wanted, most))
        group = heads // kv_heads
        return cls(group, max(gpu_chip.power_of_two(group), TILE), dim, block, parts)


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    ragged: RaggedBatch,
    sinks: jax.Array | None,
    options: Options,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The decode rows of a batch: writes k and v [T, K, H] into `pages`, in place, and attends with
    q [T, N, H]. Returns the output [T, N, H], 0 for further rows and anything from token S on, and
    `pages`.
    """
    _, heads, dim = q.shape
    rows, kv_heads = ragged.num_rows_padded, k.shape[1]
    tiles = Tiles.of(q, pages, table, options.window)
    shape = jax.ShapeDtypeStruct
    if tiles.parts == 1:
        results = (shape(q.shape, q.dtype),)
    else:
        scalars = shape((rows, tiles.parts, heads), F32)
        results = (shape((rows, tiles.parts, heads, dim), F32), scalars, scalars)
    optional = () if sinks is None else (sinks.astype(F32),)
    operands = (q, k, v, table, ragged.seq_lens, ragged.counts, *optional, pages)
    pages, *attended = pl.pallas_call(
        functools.partial(_decode_kernel, tiles=tiles, options=options, sinks=sinks is not None),
        grid=(kv_heads, tiles.parts, rows),
        out_shape=(shape(pages.shape, pages.dtype), *results),
        input_output_aliases={len(operands) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=STAGES),
        interpret=interpret,
        name="paged_attention_decode",
    )(*operands)
    if tiles.parts == 1:
        return attended[0], pages
    out = pl.pallas_call(
        functools.partial(_combine_kernel, tiles=tiles),
        grid=(heads, rows),
        out_shape=shape(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_attention_combine",
    )(*attended, *optional)
    return out, pages


def _decode_kernel(
    q: Any, k: Any, v: Any, table: Any, seq_lens: Any, counts: Any, *refs: Any,
    tiles: Tiles, options: Options, sinks: bool,
) -> None:  # fmt: skip
    """One part of a row's context, for the queries of one KV head.

    refs: sinks if there are any, pages before and after, then out [S, N, H] or, of each part,
    values [S, parts, N, H], total and highest [S, parts, N], not divided.
    """
    sink_logits, (before, pages, *results) = refs[:sinks], refs[sinks:]
    head, part, row = (pl.program_id(axis) for axis in range(3))
    _, size, _, head_dim = pages.shape
    width = table.shape[1]
    group = jnp.arange(tiles.heads)
    channel = jnp.arange(tiles.dim)
    queries = head * tiles.group + group
    real_query, real_channel = group < tiles.group, channel < head_dim
    decodes = row < counts[0]
    last = jnp.where(decodes, seq_lens[row] - 1, 0)  # position of the step's own token
    first = 0 if options.window is None else jnp.maximum(last - options.window + 1, 0)

    tile = real_query[:, None] & real_channel[None]
    q_tile = plgpu.load(q.at[row, queries[:, None], channel[None]], mask=tile & decodes, other=0.0)
    k_new = plgpu.load(k.at[row, head, channel], mask=real_channel & decodes, other=0.0)
    v_new = plgpu.load(v.at[row, head, channel], mask=real_channel & decodes, other=0.0)
    k_new, v_new = storage.encode(k_new, pages.dtype), storage.encode(v_new, pages.dtype)

    @pl.when(decodes & (part == 0))
    def _write() -> None:
        page = table[row, lax.rem(lax.div(last, size), width)]
        offset = lax.rem(last, size)
        plgpu.store(pages.at[page, offset, 2 * head, channel], k_new, mask=real_channel)
        plgpu.store(pages.at[page, offset, 2 * head + 1, channel], v_new, mask=real_channel)

    own = decodes & (part == 0)
    own_logits = logits(jnp.sum(q_tile.astype(F32) * k_new.astype(F32)[None], axis=1), options)
    highest = jnp.where(own, own_logits, LOWEST)
    total = jnp.where(own, jnp.ones_like(own_logits), 0.0)
    values = jnp.where(own, jnp.broadcast_to(v_new.astype(F32)[None], tile.shape), 0.0)

    def attend(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, values = state
        position = first + i * tiles.block + jnp.arange(tiles.block)
        seen = position < last
        column = lax.rem(lax.div(position, size), width)
        page = plgpu.load(table.at[row, column], mask=seen, other=0)[:, None]
        offset = lax.rem(position, size)[:, None]
        loaded = seen[:, None] & real_channel[None]

        def read(which: int) -> jax.Array:
            at = before.at[page, offset, 2 * head + which, channel[None]]
            return plgpu.load(at, mask=loaded, other=nothing(pages.dtype)).astype(q_tile.dtype)

        scores = jnp.where(seen[None], logits(product(q_tile, read(0).T), options), LOWEST)
        new = jnp.maximum(highest, jnp.max(scores, axis=1))
        weights, rescale = jnp.exp2(scores - new[:, None]), jnp.exp2(highest - new)
        total = rescale * total + jnp.sum(weights, axis=1)
        values = rescale[:, None] * values + product(weights.astype(q_tile.dtype), read(1))
        return new, total, values

    blocks = lax.div(last - first + tiles.block - 1, tiles.block)
    each = lax.div(blocks + tiles.parts - 1, tiles.parts)
    begin = jnp.minimum(part * each, blocks)
    state = lax.fori_loop(
        begin, jnp.minimum(begin + each, blocks), attend, (highest, total, values)
    )
    highest, total, values = state
    if tiles.parts == 1:
        sink = None
        if sink_logits:
            sink = plgpu.load(sink_logits[0].at[queries], mask=real_query, other=0.0)
        attended = _finish(highest, total, values, sink)
        plgpu.store(results[0].at[row, queries[:, None], channel[None]],
                    attended.astype(q.dtype), mask=tile)  # fmt: skip
        return
    plgpu.store(results[0].at[row, part, queries[:, None], channel[None]], values, mask=tile)
    plgpu.store(results[1].at[row, part, queries], total, mask=real_query)
    plgpu.store(results[2].at[row, part, queries], highest, mask=real_query)


def _combine_kernel(values: Any, total: Any, highest: Any, *refs: Any, tiles: Tiles) -> None:
    """All parts of one row's context, for one query head. refs: sinks if there are any, out."""
    *sinks, out = refs
    head, row = pl.program_id(0), pl.program_id(1)
    channel = jnp.arange(tiles.dim)
    real = channel < out.shape[2]
    part = jnp.arange(tiles.parts)
    part_highest = highest[row, part, head]
    most = jnp.max(part_highest)
    weights = jnp.exp2(part_highest - most)
    at = values.at[row, part[:, None], head, channel[None]]
    each = plgpu.load(at, mask=jnp.broadcast_to(real[None], (tiles.parts, tiles.dim)), other=0.0)
    summed = jnp.sum(weights[:, None] * each, axis=0)
    sink = sinks[0][head] if sinks else None
    attended = _finish(most, jnp.sum(weights * total[row, part, head]), summed, sink)
    plgpu.store(out.at[row, head, channel], attended.astype(out.dtype), mask=real)


def _finish(
    highest: jax.Array, total: jax.Array, values: jax.Array, sink: jax.Array | None
) -> jax.Array:
    """The softmax of base 2, divided: highest and total [...], values [..., D], sink [...]."""
    if sink is not None:
        most = jnp.maximum(highest, sink * LOG2_E)
        rescale = jnp.exp2(highest - most)
        total = rescale * total + jnp.exp2(sink * LOG2_E - most)
        values = rescale[..., None] * values
    nothing = total == 0.0
    return jnp.where(nothing[..., None], 0.0, values / jnp.where(nothing, 1.0, total)[..., None])


def logits(products: jax.Array, options: Options) -> jax.Array:
    """Of base 2, from products of queries and keys."""
    if options.softcap is None:
        return products * (options.scale * LOG2_E)
    capped = jnp.tanh(products * (options.scale / options.softcap))
    return capped * (options.softcap * LOG2_E)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Float32 operands are not rounded to tf32."""
    return plgpu.dot(a, b, precision=lax.Precision.HIGHEST if a.dtype == F32 else None)
