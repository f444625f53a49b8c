"""In which pieces the prefill kernel of paged attention takes tokens, heads and pages."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.tpu_layout import F32, LANES, LOG2E, Layout, divide
from pallas_kernels.registry import ArrayFacts

SUBLANES = 8
SLOTS = 2  # blocks of pages in VMEM: one in use, one on its way
TILE = 512  # tokens, as far as they fit
ROWS = 512  # of one head in one product
ROW_PIECE = 256  # of them, under way at a time: the width of the matrix unit
WIDTH_STEP = 128
BLOCK_TOKENS = 1024
SMALLEST_TILE = 2 * SUBLANES
SMALLEST_ROWS = LANES  # they lie along lanes
UNROLL = 4  # products of a turn of the inner loop
PIECE_TOKENS = 256  # whose K and V are taken apart at a time; whole steps of the width


class PrefillLayout(NamedTuple):
    """Sizes of the kernel's pieces. Static."""

    pages: Layout
    heads: int  # N
    kv_heads: int  # K
    groups: int  # R: query heads per KV head, padded to a power of two, and to 8 of all heads
    tile: int  # tokens
    rows: int  # of one head in one product
    width: int  # of the table

    @classmethod
    def of(
        cls,
        q: jax.Array | ArrayFacts,
        pages: jax.Array | ArrayFacts,
        table: jax.Array | ArrayFacts,
        kv_heads: int,
        vmem_limit: int,
    ) -> "PrefillLayout":
        """Of q [T, N, H], pages [P, G, R, H] and table [S, M]: the largest pieces that fit.

        The smallest may not fit either: see `vmem_bytes`.
        """
        size, width = pages.shape[1], table.shape[1]
        heads = q.shape[1]
        groups = _power_of_two_above(heads // kv_heads)
        while kv_heads * groups % SUBLANES:
            groups *= 2
        pair = 1 + kv_heads % 2  # see `pair_parts`
        smallest = max(SMALLEST_TILE, SMALLEST_ROWS * pair // groups)
        tile = max(min(TILE, _power_of_two_above(q.shape[0])), smallest)
        tokens = max(min(BLOCK_TOKENS, _power_of_two_above(width * size)), LANES)
        while True:
            seen = Layout.of(pages, kv_heads, width, None)
            seen = seen._replace(block=max(tokens // size, 1))
            rows = min(ROWS, tile * groups // pair)
            layout = cls(seen, heads, kv_heads, groups, tile, rows, width)
            if layout.vmem_bytes <= vmem_limit:
                return layout
            if tile > LANES or tokens == LANES:
                if tile == smallest:
                    return layout
                tile //= 2
            else:
                tokens //= 2

    @property
    def width_step(self) -> int:
        """By how many keys the products of queries that see a part of a block only differ."""
        return min(WIDTH_STEP, self.pages.block_tokens)

    @property
    def row_tokens(self) -> int:
        """Tokens of `rows`."""
        return self.rows // self.groups

    @property
    def row_pieces(self) -> list[slice]:
        """Pieces of a product's rows, of which scores and weights are computed in turn."""
        step = min(ROW_PIECE, self.rows)
        return [slice(at, at + step) for at in range(0, self.rows, step)]

    @property
    def parts(self) -> int:
        """Products with the queries of one head of a tile."""
        return self.tile * self.groups // self.rows

    @property
    def pair_parts(self) -> int:
        """Parts that two products under way at a time belong to: of two heads, or of one."""
        return 1 + self.kv_heads % 2

    @property
    def unroll(self) -> int:
        """Products of a turn of the inner loop, at whose ends the matrix unit runs dry."""
        return 2 if self.kv_heads % UNROLL else UNROLL

    @property
    def sum_rows(self) -> int:
        """Rows of ones below V^T, one tile: products with them are the sums of weights."""
        return SUBLANES * self.pages.packing

    def parts_of(self, length: jax.Array) -> jax.Array:
        """Parts of a tile of so many tokens, whole pairs."""
        tokens = self.pair_parts * self.row_tokens
        return self.pair_parts * divide(length + (tokens - 1), tokens)

    def tokens_of(self, part: jax.Array, length: jax.Array) -> jax.Array:
        """Tokens of a part of a tile of so many tokens, which may end before it."""
        return jnp.clip(length - part * self.row_tokens, 0, self.row_tokens)

    def seen_keys(self, num_keys: int, row: int) -> int:
        """How many keys of a product the rows before `row` may see.

        After the last key of one that is narrower than the block, no query of a part comes.
        """
        if num_keys == self.pages.block_tokens:
            return num_keys
        return max(num_keys - (self.rows - row) // self.groups, SUBLANES)

    def sure_keys(self, num_keys: int, row: int) -> int:
        """Which first keys of a product no diagonal hides from `row` on.

        All but the last step and the parts up to there.
        """
        unsure = self.width_step + self.pair_parts * self.row_tokens - row // self.groups
        return max(num_keys - unsure, 0) & -SUBLANES

    @property
    def piece(self) -> int:
        """Pages whose K and V are taken apart at a time."""
        return max(min(PIECE_TOKENS // self.pages.page_size, self.pages.block), 1)

    @property
    def vmem_bytes(self) -> int:
        """What the kernel needs, about."""
        pages, item = self.pages, 4 // self.pages.packing
        dim, tokens = pages.chunks * LANES, pages.block_tokens
        rows = self.kv_heads * self.groups * self.tile
        per_row = 3 * dim * item + 4 * (dim + self.sum_rows + SUBLANES)
        block = pages.block_rows * LANES * item
        split = self.kv_heads * tokens * (2 * dim + self.sum_rows) * item
        words = self.piece * pages.page_rows * LANES * item
        scores = 5 * self.rows * max(tokens, LANES) * 4  # two, weights, and what is spilled
        return rows * per_row + SLOTS * block + split + words + scores

    def pad_heads(self, x: jax.Array) -> jax.Array:
        """[T, N, H] -> [T, K * R, H]; nothing happens for the usual numbers of heads."""
        groups = self.heads // self.kv_heads
        if groups == self.groups:
            return x
        x = x.reshape(x.shape[0], self.kv_heads, groups, x.shape[2])
        x = jnp.pad(x, ((0, 0), (0, 0), (0, self.groups - groups), (0, 0)))
        return x.reshape(x.shape[0], self.kv_heads * self.groups, x.shape[3])

    def drop_heads(self, x: jax.Array) -> jax.Array:
        """The inverse of `pad_heads`."""
        groups = self.heads // self.kv_heads
        if groups == self.groups:
            return x
        x = x.reshape(x.shape[0], self.kv_heads, self.groups, x.shape[2])[:, :, :groups]
        return x.reshape(x.shape[0], self.heads, x.shape[3])

    def sink_rows(self, sinks: jax.Array | None) -> jax.Array:
        """f32[N] -> f32[K, 1, rows] in units of log 2: of each row."""
        if sinks is None:
            return jnp.zeros((1, 1, LANES), F32)
        logits = self.pad_heads((sinks.astype(F32) * LOG2E)[None, :, None])
        logits = logits.reshape(self.kv_heads, 1, self.groups)
        return jnp.tile(logits, (1, 1, self.row_tokens))


def _power_of_two_above(n: int) -> int:
    """The lowest that is not below n."""
    return 1 << (n - 1).bit_length()
