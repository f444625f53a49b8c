"""How the TPU kernels of paged attention see pages, and in which pieces they take them."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout as XlaLayout
from jax.experimental.layout import with_layout_constraint

from pallas_kernels.paged_attention.pages import share_rows
from pallas_kernels.registry import ArrayFacts

F32 = jnp.float32
LOWEST = -1e30
LOG2E = math.log2(math.e)
LANES = 128
BLOCK_TOKENS = 1024
BLOCK_BYTES = 2 << 20  # of K and V, whole vectors of lanes; large blocks hide latencies
CHUNK_ROWS = 512


class Options(NamedTuple):
    """The static options of a call."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    kv_heads: int  # of the pages, which may have more than the model: see `pages.pages_shape`


class Layout(NamedTuple):
    """How a page lies in memory, and how many make a block. Static."""

    page_size: int
    kv_rows: int  # R
    dim: int  # H
    tile: int  # rows of a token that lie together before the next chunk
    chunks: int  # C
    lanes: int  # L
    block: int  # B
    packing: int  # products' operands in a word: 2 lets `_keys_and_values` take K and V apart
    shared: bool  # K and V of a head are the halves of one row

    @classmethod
    def of(
        cls,
        pages: jax.Array | ArrayFacts,
        kv_heads: int,
        table_width: int,
        window: int | None,
    ) -> "Layout":
        """Of pages [P, G, R, H]."""
        _, size, rows, dim = pages.shape
        itemsize = jnp.dtype(pages.dtype).itemsize
        packing = 1 if itemsize == 4 else 2  # float8 and int8 become bfloat16
        chunks = dim // LANES if dim > LANES else 1
        token_bytes = rows * chunks * LANES * itemsize
        # Products of float32 are made of several of bfloat16, and of parts of their operands.
        block_bytes = BLOCK_BYTES // (4 if packing == 1 else 1)
        tokens = max(min(BLOCK_TOKENS, block_bytes // token_bytes), size)
        shared = share_rows(rows, kv_heads)
        layout = cls(size, rows, dim, min(rows, 8), chunks, dim // chunks, 1, packing, shared)
        if window is None:
            # A power of two: shifts divide by it.
            return layout._replace(block=_power_of_two(min(tokens // size, table_width)))
        # Few and equal blocks, since each costs the time of one product after the other.
        most = min(pages_seen(window, size), table_width)
        count = max(1, -(-most * size * 8 // (tokens * 9)))
        quantum = layout.pages_per_chunk
        return layout._replace(block=-(-most // (count * quantum)) * quantum)

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

    @property
    def column_rows(self) -> int:
        """Rows of one column of scores: two where K and V are rows that are taken apart."""
        return 1 if self.shared else self.packing

    @property
    def columns(self) -> int:
        """Columns of a block's scores."""
        return self.block_rows // self.column_rows

    @property
    def token_columns(self) -> int:
        """Columns of one token."""
        return self.token_rows // self.column_rows

    @property
    def chunk_columns(self) -> int:
        """Columns from one chunk of a head to the next."""
        return self.tile // self.column_rows

    @property
    def pages_per_chunk(self) -> int:
        """Pages that one product takes together."""
        return _power_of_two(max(CHUNK_ROWS // self.page_rows, 1))

    @property
    def chunk_rows(self) -> int:
        """Rows of one product, so that what is alive stays small: a part of a page, or pages."""
        if self.page_rows >= CHUNK_ROWS:
            return CHUNK_ROWS if self.page_rows % CHUNK_ROWS == 0 else self.page_rows
        return self.page_rows * min(self.pages_per_chunk, self.block)


def _power_of_two(n: int) -> int:
    """The highest that is not above n."""
    return 1 << (n.bit_length() - 1)


def pages_seen(window: int, page_size: int) -> int:
    """How many pages a window may touch."""
    return -(-(window - 1) // page_size) + 1


def as_rows(pages: jax.Array, layout: Layout) -> jax.Array:
    """Pages [P, G, R, H] as [P, W, L], in the order in which TPU memory holds them."""
    count, tile, chunks = pages.shape[0], layout.tile, layout.chunks
    tiles = layout.kv_rows // tile
    cut = pages.reshape(count, layout.page_size, tiles, tile, chunks, layout.lanes)
    if pages.dtype.itemsize == 1:
        # Otherwise XLA would lay bytes out with the page number along lanes, and copy the pool.
        cut = with_layout_constraint(cut, XlaLayout(major_to_minor=(0, 1, 2, 4, 3, 5)))
    cut = cut.transpose(0, 1, 2, 4, 3, 5)
    return cut.reshape(count, layout.page_rows, layout.lanes)


def divide(x: jax.Array, by: int) -> jax.Array:
    """x // by of scalars that are not negative; a shift where it can be one."""
    return x >> (by.bit_length() - 1) if by & (by - 1) == 0 else lax.div(x, by)


def modulo(x: jax.Array, by: int) -> jax.Array:
    """x % by of scalars that are not negative."""
    return x & (by - 1) if by & (by - 1) == 0 else lax.rem(x, by)


def operand(rows: jax.Array) -> jax.Array:
    """Rows of pages as products take them: float8 and int8 become bfloat16."""
    return rows.astype(jnp.bfloat16) if rows.dtype.itemsize == 1 else rows


def precision(dtype: Any) -> lax.Precision | None:
    """Of products: float32 needs more than one pass of the matrix unit, bfloat16 does not."""
    return lax.Precision.HIGHEST if dtype == F32 else None
