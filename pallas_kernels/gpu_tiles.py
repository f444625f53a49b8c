"""How Triton kernels go over prefill rows: a program per tile of one row's tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ragged import RaggedBatch


class Tile(NamedTuple):
    """Some tokens of one row, or of the padding at the end of the batch, or none: i32[] each."""

    row: jax.Array  # -1: padding
    start: jax.Array  # its first token
    length: jax.Array  # tokens, possibly 0
    position: jax.Array  # of its first token in the sequence; 0 for padding

    @classmethod
    def read(cls, table: Any, index: jax.Array) -> "Tile":
        """One of the tiles that `tile_table` made."""
        return cls(*(table[index, i] for i in range(len(cls._fields))))


def tile_table(ragged: RaggedBatch, num_tokens: int, size: int) -> jax.Array:
    """i32[N, 4]: tiles of at most `size` tokens, N = T / size, rounded up, + S, for any batch.

    They cover the prefill rows and, in whole tiles that are cut at T, the padding. The last tiles
    of a row come first: those of attention have the most to do.
    """
    blocks = ragged.prefill_blocks(size)
    count = -(-num_tokens // size) + ragged.num_rows_padded
    index = jnp.arange(count - 1, -1, -1, dtype=jnp.int32)
    row, start, length, _ = blocks.block(index)
    row = jnp.minimum(row, ragged.num_rows_padded - 1)
    position = ragged.seq_lens[row] - (ragged.query_start_loc[row + 1] - start)
    # There are enough tiles left: a row has less than one tile more than its tokens fill.
    padding = ragged.query_start_loc[ragged.counts[1]] + (index - blocks.total) * size
    rest = jnp.clip(num_tokens - padding, 0, size)
    of_row = jnp.stack([row, start, length, position], axis=1)
    nothing = jnp.zeros_like(row)
    of_padding = jnp.stack([nothing - 1, padding, rest, nothing], axis=1)
    return jnp.where((index < blocks.total)[:, None], of_row, of_padding)
