"""How rows of different lengths share one flat token axis.

Every op of this package that works on a batch of sequences takes a `RaggedBatch`: the tokens of all
rows are concatenated (no padding between rows), decode rows first, then prefill rows, then padding.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """Row boundaries of a flat batch of T tokens and S rows.

    Rows `[0, counts[0])` are decode rows: exactly one token each, so row i owns token i. Rows
    `[counts[0], counts[1])` are prefill rows of any length >= 1. The rest is padding: no tokens,
    `seq_lens` 0. Tokens at or after `query_start_loc[counts[1]]` are padding.

    Which rows decode is decided by the caller's phase, never by a length: a prompt of one token is
    a prefill row.
    """

    query_start_loc: jax.Array  # i32[S + 1]
    seq_lens: jax.Array  # i32[S] tokens of the row after this step, earlier ones included
    counts: jax.Array  # i32[2] decode rows, all rows
    decode_only: bool = field(metadata={"static": True})  # no prefill rows: T == S

    @property
    def num_rows_padded(self) -> int:
        """S, padding included."""
        return self.seq_lens.shape[0]

    @property
    def query_lens(self) -> jax.Array:
        """i32[S]: tokens of each row in this step."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    @property
    def has_state(self) -> jax.Array:
        """bool[S]: the row has tokens before this step; otherwise kernels start from zeros."""
        return self.seq_lens > self.query_lens

    def check(self, num_tokens: int, op: str) -> None:
        """Raises ValueError, naming `op`, unless a flat axis of `num_tokens` fits this batch."""
        rows = self.num_rows_padded
        if self.seq_lens.ndim != 1 or not rows or not num_tokens:
            raise ValueError(
                f"{op}: a batch has at least one row, of seq_lens [S], and one token, padding "
                f"included; got seq_lens {self.seq_lens.shape} and {num_tokens} tokens"
            )
        for name in ("query_start_loc", "seq_lens", "counts"):
            if (dtype := getattr(self, name).dtype) != jnp.int32:
                raise ValueError(f"{op}: {name} must be int32, got {dtype}")
        if self.query_start_loc.shape != (rows + 1,) or self.counts.shape != (2,):
            raise ValueError(
                f"{op}: {rows} rows need query_start_loc [{rows + 1}] and counts [2], "
                f"got {self.query_start_loc.shape} and {self.counts.shape}"
            )
        if num_tokens < rows or (self.decode_only and num_tokens != rows):
            relation = "==" if self.decode_only else ">="
            raise ValueError(f"{op}: needs tokens {relation} rows, got {num_tokens} and {rows}")

    @property
    def row_valid(self) -> jax.Array:
        """bool[S]: the row is not padding."""
        return jnp.arange(self.num_rows_padded, dtype=jnp.int32) < self.counts[1]

    def token_valid(self, num_tokens: int) -> jax.Array:
        """bool[T]: the token is not padding."""
        return jnp.arange(num_tokens, dtype=jnp.int32) < self.query_start_loc[self.counts[1]]

    def token_rows(self, num_tokens: int) -> jax.Array:
        """i32[T]: the row of each token; padding tokens get S (one past the last row).

        Example: query_start_loc [0, 1, 2, 5, 5], T 8 -> [0, 1, 2, 2, 2, 4, 4, 4].
        """
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.searchsorted(self.query_start_loc[1:], token, side="right").astype(jnp.int32)
        return jnp.where(self.token_valid(num_tokens), row, self.num_rows_padded)

    def positions(self, num_tokens: int) -> jax.Array:
        """i32[T]: position of each token in its sequence; 0 for padding tokens."""
        rows = self.token_rows(num_tokens)
        safe = jnp.minimum(rows, self.num_rows_padded - 1)
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        position = token - self.query_start_loc[safe] + self.seq_lens[safe] - self.query_lens[safe]
        return jnp.where(rows < self.num_rows_padded, position, 0)

    def prefill_blocks(self, size: int) -> "PrefillBlocks":
        """The prefill rows cut into blocks of at most `size` tokens, in token order."""
        row = jnp.arange(self.num_rows_padded, dtype=jnp.int32)
        prefill = (row >= self.counts[0]) & (row < self.counts[1])
        blocks = jnp.where(prefill, (self.query_lens + size - 1) // size, 0)
        return PrefillBlocks(
            self.query_start_loc, jnp.cumsum(blocks, dtype=jnp.int32), blocks, size
        )


class PrefillBlocks(NamedTuple):
    """Blocks of prefill tokens; a loop over `total` of them does the real work and no padding."""

    query_start_loc: jax.Array  # i32[S + 1]
    ends: jax.Array  # i32[S] blocks of rows 0..s
    per_row: jax.Array  # i32[S] blocks of row s
    size: int

    @property
    def total(self) -> jax.Array:
        """i32[]: number of blocks."""
        return self.ends[-1]

    def block(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Block i: its row, first token, number of tokens, and its index within the row."""
        row = jnp.searchsorted(self.ends, i, side="right").astype(jnp.int32)
        index = i - (self.ends[row] - self.per_row[row])
        start = self.query_start_loc[row] + index * self.size
        length = jnp.minimum(self.query_start_loc[row + 1] - start, self.size)
        return row, start, length, index
