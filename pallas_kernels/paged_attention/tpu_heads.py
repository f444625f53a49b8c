"""Takes heads apart in VMEM, and puts them together: what the products of prefill want.

Tokens come as [tokens, heads, H]; products want rows (token, head of the group) for each KV head,
and K and V of each head by themselves. Work goes by a few tokens at a time, in float32 or words of
32 bits, where a vector register holds 8 sublanes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_layout import F32, LANES, divide, operand
from pallas_kernels.paged_attention.tpu_prefill_layout import SUBLANES, PrefillLayout

TOKENS = 32  # at a time


def split_heads(
    tokens: Any, queries: Any, part: jax.Array, length: jax.Array, layout: PrefillLayout,
    factor: float,
) -> None:  # fmt: skip
    """Of a part, [tile, K * R, H] times `factor` -> queries [K, tile * R, H].

    The tile has `length` tokens.
    """
    step, groups = min(TOKENS, layout.row_tokens), layout.groups

    def some(i: jax.Array, _: None) -> None:
        first = part * layout.row_tokens + i * step
        x = tokens[pl.ds(first, step)].astype(F32) * factor
        at = pl.ds(pl.multiple_of(first * groups, step * groups), step * groups)
        width = max(groups, SUBLANES)
        for n in range(0, x.shape[1], width):
            parts = _exchange(_by_token(x[:, n : n + width], groups), groups)
            for j, rows in enumerate(parts):
                rows = rows.reshape(step * groups, x.shape[2])
                queries[n // groups + j, at] = rows.astype(queries.dtype)

    count = layout.tokens_of(part, length)
    lax.fori_loop(0, divide(count + (step - 1), step), some, None)


def join_heads(sums: Any, tokens: Any, part: jax.Array, layout: PrefillLayout) -> None:
    """Of a part, sums [K, parts, H + 1, rows], the last those of weights -> [tile, K * R, H]."""
    groups, dim = layout.groups, tokens.shape[2]
    step = min(LANES, layout.rows)
    per_register, width = max(SUBLANES // groups, 1), max(groups, SUBLANES)  # of KV heads; rows
    for at in range(0, layout.rows, step):

        def averages(j: int, lanes: slice = slice(at, at + step)) -> jax.Array:
            rows = sums[j, part, :dim, lanes] * (1.0 / sums[j, part, dim : dim + 1, lanes])
            return rows.T.reshape(step // width, width, dim)

        heads = []
        for j in range(0, layout.kv_heads, per_register):
            joined = _exchange([averages(j + n) for n in range(per_register)], groups)
            joined = joined[0] if per_register == 1 else jnp.stack(joined, 1)
            heads.append(joined.reshape(step // groups, -1, dim))
        first = part * layout.row_tokens + at // groups
        values = jnp.concatenate(heads, 1).astype(tokens.dtype)
        tokens[pl.ds(first, step // groups)] = values


def _by_token(x: jax.Array, groups: int) -> list[jax.Array]:
    """[tokens, 8, H] -> of as many tokens as there are KV heads in 8: the first, second, ..."""
    count = max(SUBLANES // groups, 1)
    if count == 1:
        return [x]
    x = x.reshape(x.shape[0] // count, count, *x.shape[1:])
    return [x[:, n] for n in range(count)]


def _exchange(parts: list[jax.Array], groups: int) -> list[jax.Array]:
    """Swaps the number of a part with that of the group of sublanes: its own inverse.

    Parts [n, 8, H] of tokens, whose sublanes are (KV head, head of the group), become parts of KV
    heads, whose sublanes are (token, head of the group).
    """
    parts = list(parts)
    bit = len(parts) // 2
    while bit:
        span = bit * groups
        shape = parts[0].shape
        keep = (lax.broadcasted_iota(jnp.int32, shape, 1) & span) == 0
        for n in range(len(parts)):
            if n & bit == 0:
                a, b = parts[n], parts[n | bit]
                parts[n] = jnp.where(keep, a, pltpu.roll(b, span, 1))
                parts[n | bit] = jnp.where(keep, pltpu.roll(a, SUBLANES - span, 1), b)
        bit //= 2
    return parts


def split_kv(
    buffer: Any, slot: jax.Array, count: jax.Array, words: Any, keys: Any, values: Any,
    layout: PrefillLayout,
) -> None:  # fmt: skip
    """The first `count` tokens of a block -> keys [K, tokens, H], values [K, H, tokens].

    Tokens after them may come along.
    """
    pages, piece = layout.pages, layout.piece
    tokens = piece * pages.page_size

    def some(i: jax.Array, _: None) -> None:
        rows = buffer[slot, pl.ds(i * piece, piece)]
        rows = operand(rows.reshape(piece * pages.page_rows, pages.lanes))
        words[...] = pltpu.bitcast(rows, jnp.uint32) if pages.packing == 2 else rows
        at = pl.ds(pl.multiple_of(i * tokens, tokens), tokens)
        for j in range(layout.kv_heads):
            for c in range(pages.chunks):
                lanes = slice(c * LANES, c * LANES + pages.lanes)
                k, v = _chunk_of_head(words, j, c, tokens, layout)
                keys[j, at, lanes] = k.astype(keys.dtype)
                values[j, lanes, at] = v.T.astype(values.dtype)

    lax.fori_loop(0, divide(count + (tokens - 1), tokens), some, None)


def _chunk_of_head(
    words: Any, head: int, chunk: int, tokens: int, layout: PrefillLayout
) -> tuple[jax.Array, jax.Array]:
    """K and V [tokens, L] of one chunk of lanes of a head."""
    pages = layout.pages
    if pages.shared:
        at, half = divmod(head, pages.packing)
        word = words[pl.ds(at, tokens, stride=pages.token_rows // pages.packing), :]
        row = word if pages.packing == 1 else _half(word, half)
        return row, row
    key = head if pages.packing == 2 else 2 * head
    which, within = divmod(key, pages.chunk_columns)
    at = (which * pages.chunks + chunk) * pages.chunk_columns + within
    word = words[pl.ds(at, tokens, stride=pages.token_columns), :]
    if pages.packing == 1:
        return word, words[pl.ds(at + 1, tokens, stride=pages.token_columns), :]
    return _half(word, 0), _half(word, 1)


def _half(words: jax.Array, half: int) -> jax.Array:
    """The first or second 16 bits of words as float32: two rows of bfloat16 share a row of them."""
    return pltpu.bitcast(words & jnp.uint32(0xFFFF0000) if half else words << 16, F32)
