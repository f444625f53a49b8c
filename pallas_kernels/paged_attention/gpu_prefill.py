"""Attention of prefill rows on GPUs: flash attention over pages, by tiles of one row's tokens.

A first kernel puts the step's K and V into the pages. Then a program has the queries of a tile and
of one KV head, as rows (token, query head of the group) of its products, and goes over the row's
pages in blocks of tokens: all that any query of the tile sees, and nothing else. Since K and V were
written before, tokens of this step and of earlier ones are the same to it, and float8 rounds both.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import gpu_chip, platform, storage, tuning
from pallas_kernels.gpu_tiles import Tile, tile_table
from pallas_kernels.paged_attention.gpu_decode import LOG2_E, TILE, logits, product
from pallas_kernels.paged_attention.pages import nothing
from pallas_kernels.paged_attention.reference import LOWEST, Options
from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32
WRITE_TOKENS = 16  # of K and V that a program has at a time
WARPS = 8
STAGES = 2  # K and V, products
FLOAT32_ROWS, FLOAT32_BLOCK = 16, 16  # no tensor cores: operands are in registers


class Tiling(NamedTuple):
    """Sizes of what a program holds. Static."""

    group: int  # query heads of a KV head
    rows: int  # of products: (token, query head), `rows // group` tokens
    dim: int
    block: int  # tokens of context per iteration

    @property
    def tokens(self) -> int:
        """Of a tile."""
        return self.rows // self.group

    @classmethod
    def of(cls, q: jax.Array, pages: jax.Array, kv_heads: int) -> "Tiling":
        """For q [T, N, H]: the largest that all three generations take without spilling."""
        tokens, heads, head_dim = q.shape
        dim = max(gpu_chip.power_of_two(head_dim), TILE)
        group = heads // kv_heads
        if q.dtype == F32:
            return cls(group, FLOAT32_ROWS, dim, FLOAT32_BLOCK)
        wide, old = dim > 128, "A100" in platform.current().kind
        few = tokens * heads < 128 * gpu_chip.PROCESSORS
        most = 64 if wide and old else 128
        shape = tokens, heads, kv_heads, head_dim
        sizes = gpu_chip.powers(64, most)
        rows = tuning.pick("paged_attention.prefill_rows", shape, sizes, 64 if few else most)
        # What bytes are converted to takes registers, too.
        small = TILE if wide and pages.dtype.itemsize == 1 else 2 * TILE
        most = small if old else 4096 // rows if wide else 64
        sizes = gpu_chip.powers(TILE, most)
        block = tuning.pick("paged_attention.prefill_block", (*shape, rows), sizes, most)
        return cls(group, rows, dim, block)


def prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    ragged: RaggedBatch,
    sinks: jax.Array | None,
    options: Options,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The prefill rows of a batch.

    Args:
        q: [T, N, H]. k, v: [T, K, H].
        out: [T, N, H] in the dtype of q, with the output of the decode rows.
        pages, table, ragged, sinks: as in `api.paged_attention`.
        options: static.
        interpret: as in `pl.pallas_call`.

    Returns:
        `out` with the output of the prefill rows and 0 for padding tokens, and `pages` with their
        K and V, both updated in place.
    """
    kv_heads = k.shape[1]
    tiling = Tiling.of(q, pages, kv_heads)
    tiles = tile_table(ragged, q.shape[0], tiling.tokens)
    grid = (tiles.shape[0], kv_heads)
    shape = jax.ShapeDtypeStruct
    pages = pl.pallas_call(
        functools.partial(_write_kernel, dim=tiling.dim),
        grid=grid,
        out_shape=shape(pages.shape, pages.dtype),
        input_output_aliases={4: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_attention_write",
    )(k, v, table, tiles, pages)
    optional = () if sinks is None else (sinks.astype(F32),)
    operands = (q, table, tiles, *optional, pages, out)
    out = pl.pallas_call(
        functools.partial(_prefill_kernel, tiling=tiling, options=options),
        grid=grid,
        out_shape=shape(out.shape, out.dtype),
        input_output_aliases={len(operands) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="paged_attention_prefill",
    )(*operands)
    return out, pages


def _write_kernel(
    k: Any, v: Any, table: Any, tiles: Any, before: Any, pages: Any, *, dim: int
) -> None:
    """Puts K and V of one tile's tokens, for one KV head, into pages [P, G, 2K, H]."""
    del before
    tile, head = Tile.read(tiles, pl.program_id(0)), pl.program_id(1)
    _, size, _, head_dim = pages.shape
    channel = jnp.arange(dim)

    @pl.loop(0, lax.div(jnp.where(tile.row < 0, 0, tile.length) + WRITE_TOKENS - 1, WRITE_TOKENS))
    def _some(i: jax.Array) -> None:
        token = i * WRITE_TOKENS + jnp.arange(WRITE_TOKENS)
        real = token < tile.length
        position = tile.position + token
        column = lax.rem(lax.div(position, size), table.shape[1])
        page = plgpu.load(table.at[tile.row, column], mask=real, other=0)[:, None]
        offset = lax.rem(position, size)[:, None]
        mask = real[:, None] & (channel < head_dim)[None]
        for which, new in enumerate((k, v)):
            at = new.at[tile.start + token[:, None], head, channel[None]]
            values = storage.encode(plgpu.load(at, mask=mask, other=0.0), pages.dtype)
            plgpu.store(pages.at[page, offset, 2 * head + which, channel[None]], values, mask=mask)


def _prefill_kernel(
    q: Any, table: Any, tiles: Any, *refs: Any, tiling: Tiling, options: Options
) -> None:
    """The queries of one tile and KV head. refs: sinks if there are any, pages, out before, out."""
    *sink_logits, pages, _, out = refs
    tile, head = Tile.read(tiles, pl.program_id(0)), pl.program_id(1)
    _, size, _, head_dim = pages.shape
    width, group, window = table.shape[1], tiling.group, options.window
    padding = tile.row < 0
    row = jnp.arange(tiling.rows)
    token = lax.div(row, group)
    query = head * group + lax.rem(row, group)
    real = token < tile.length
    channel = jnp.arange(tiling.dim)
    real_channel = channel < head_dim
    place = tile.start + token[:, None], query[:, None], channel[None]
    mask = real[:, None] & real_channel[None]
    q_tile = plgpu.load(q.at[place], mask=mask & ~padding, other=0.0)

    last = tile.position + token  # what a query sees at last
    end = jnp.where(padding, 0, tile.position + tile.length)
    first = 0 if window is None else jnp.maximum(tile.position - window + 1, 0)

    def attend(masked: bool, i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, values = state
        position = first + i * tiling.block + jnp.arange(tiling.block)
        written = position < end  # by this step or an earlier one
        column = lax.rem(lax.div(position, size), width)
        page = plgpu.load(table.at[tile.row, column], mask=written, other=0)[:, None]
        offset = lax.rem(position, size)[:, None]
        loaded = jnp.broadcast_to(real_channel[None], (tiling.block, tiling.dim))
        if masked:
            loaded &= written[:, None]

        def read(which: int) -> jax.Array:
            at = pages.at[page, offset, 2 * head + which, channel[None]]
            return plgpu.load(at, mask=loaded, other=nothing(pages.dtype)).astype(q_tile.dtype)

        scores = logits(product(q_tile, read(0).T), options)
        seen = position[None] <= last[:, None]
        if window is not None:
            seen &= position[None] > last[:, None] - window
        if masked:
            scores = jnp.where(seen, scores, LOWEST)
        new = jnp.maximum(highest, jnp.max(scores, axis=1))
        weights, rescale = jnp.exp2(scores - new[:, None]), jnp.exp2(highest - new)
        if masked:  # a query may not have seen any token yet
            weights = jnp.where(seen, weights, 0.0)
        total = rescale * total + jnp.sum(weights, axis=1)
        values = rescale[:, None] * values + product(weights.astype(q_tile.dtype), read(1))
        return new, total, values

    highest = jnp.full((tiling.rows,), LOWEST, F32)
    total = jnp.zeros((tiling.rows,), F32)
    if sink_logits:
        highest = plgpu.load(sink_logits[0].at[query], mask=real, other=0.0) * LOG2_E
        total = jnp.ones_like(total)
    state = highest, total, jnp.zeros((tiling.rows, tiling.dim), F32)
    masked, plain = functools.partial(attend, True), functools.partial(attend, False)
    # Blocks that all queries see in full lie between the edge of the window and the diagonal.
    whole = lax.div(tile.position + 1 - first, tiling.block)
    edge = 0
    if window is not None:
        beyond = tile.position + tile.length - window - first
        edge = jnp.clip(lax.div(beyond + tiling.block - 1, tiling.block), 0, whole)
        state = lax.fori_loop(0, edge, masked, state)
    state = lax.fori_loop(edge, whole, plain, state)
    blocks = lax.div(end - first + tiling.block - 1, tiling.block)
    _, total, values = lax.fori_loop(whole, blocks, masked, state)
    attended = values / jnp.where(total == 0.0, 1.0, total)[:, None]
    plgpu.store(out.at[place], attended.astype(out.dtype), mask=mask)
