"""Decays per key channel within a chunk of tokens on GPUs, before states go over the chunks.

A query and an earlier key are parted by a pair of neighbouring blocks of 1, 2, 4, … tokens: the
query lies in the right one, the key in the left one. The query decays since the edge between them,
the key until it. So every width is one matrix product for all its pairs of blocks, and no exponent
is positive, however strong a decay is. Letters as in `gpu_chunks`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpu_chunks import Chunk, Decay, beforehand, most_chunks, parts, tile_of
from pallas_kernels.gpu_rows import F32
from pallas_kernels.ragged import RaggedBatch

CHANNELS = 32  # that a program has at a time


class Decayed(NamedTuple):
    """What the walk over chunks takes, for H value heads and N chunks by number."""

    scores: list[jax.Array]  # [T, H, C] of left operands with the keys of their chunk
    grown: list[jax.Array]  # [T, H, d] left operands, decayed since the chunk began
    rest: jax.Array  # [T, H, d] keys, decayed until the chunk ends
    whole: jax.Array  # f32[N, H, d] decay over the chunk


def decayed(
    left: Sequence[jax.Array], k: jax.Array, g: jax.Array, ragged: RaggedBatch, size: int,
    interpret: Any,
) -> Decayed:  # fmt: skip
    """All chunks of `size` tokens of left operands and keys [T, Hk, d] and log decays f32[T, H, d].

    scores_ij = sum_d left_i[d] k_j[d] e^(g_(j+1)[d] + ... + g_i[d]) for j <= i, else 0. Results
    are in the dtype of k; the scores of k itself in float32.
    """
    num_tokens, heads, dim = g.shape
    count, chunks = len(left), most_chunks(ragged, num_tokens, size)
    of_keys = tuple(x is k for x in left)
    scores = [
        jax.ShapeDtypeStruct((num_tokens, heads, size), F32 if same else k.dtype)
        for same in of_keys
    ]
    rows = [jax.ShapeDtypeStruct(g.shape, k.dtype)] * (count + 1)
    result = beforehand(
        functools.partial(_kernel, of_keys), (k, g, *left),
        [*scores, *rows, jax.ShapeDtypeStruct((chunks, heads, dim), F32)], ragged,
        name="channel_decay", heads=heads, chunk=size, warps=4, interpret=interpret,
    )  # fmt: skip
    return Decayed(result[:count], result[count:-2], *result[-2:])


def _kernel(of_keys: Sequence[bool], chunk: Chunk, k: Any, g: Any, *refs: Any) -> None:
    """One chunk. of_keys: which of the left operands are k."""
    count, size, dim = len(of_keys), chunk.token.shape[0], k.shape[2]
    left, out, grown, (rest, whole) = (
        refs[:count], refs[count : 2 * count], refs[2 * count : -2], refs[-2:]
    )  # fmt: skip
    width = min(CHANNELS, tile_of(dim))
    over_channels = functools.partial(lax.fori_loop, 0, -(-dim // width))
    index = jnp.arange(size)
    i, j = index[:, None], index[None]

    def some(n: jax.Array) -> tuple[jax.Array, ...]:
        """Some channels, their log decays, keys, and left operands."""
        channel = n * width + jnp.arange(width)
        log_decay, keys = (chunk.keys(ref, channel).astype(F32) for ref in (g, k))
        rows = (
            keys if same else chunk.keys(ref, channel).astype(F32)
            for same, ref in zip(of_keys, left, strict=True)
        )  # fmt: skip
        return channel, log_decay, keys, *rows

    def write(n: jax.Array, diagonals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        channel, log_decay, keys, *rows = some(n)
        growth = jnp.exp(_sums(j <= i, log_decay))
        for ref, x in zip(grown, rows, strict=True):
            chunk.write(ref, x * growth, channel)
        chunk.write(rest, keys * jnp.exp(_sums(j > i, log_decay)), channel)
        mask = (channel < dim) & (chunk.number >= 0)
        over = jnp.exp(jnp.sum(log_decay, axis=0))
        plgpu.store(whole.at[chunk.number, chunk.head, channel], over, mask=mask)
        return tuple(
            old + jnp.sum(x * keys, axis=1) for old, x in zip(diagonals, rows, strict=True)
        )

    def with_neighbours(bit: jax.Array, scores: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        apart = lax.shift_right_logical(i ^ j, bit)  # 1: in neighbouring blocks of 2^bit
        right = (lax.shift_right_logical(i, bit) & 1) == 1
        between = (apart == 0) & ((j <= i) == right)  # a token and the edge of its block

        def add(n: jax.Array, products: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            _, log_decay, keys, *rows = some(n)
            weight = jnp.exp(_sums(between, log_decay))
            decayed = (keys * weight).astype(k.dtype)
            return tuple(
                old + plgpu.dot((x * weight).astype(k.dtype), decayed.T)
                for old, x in zip(products, rows, strict=True)
            )

        here = (apart == 1) & (i > j)
        products = over_channels(add, (jnp.zeros((size, size), F32),) * count)
        return tuple(jnp.where(here, new, old) for new, old in zip(products, scores, strict=True))

    diagonals = over_channels(write, (jnp.zeros(size, F32),) * count)
    scores = tuple(jnp.where(i == j, x[:, None], 0.0) for x in diagonals)
    scores = lax.fori_loop(0, size.bit_length() - 1, with_neighbours, scores)
    for ref, x in zip(out, scores, strict=True):
        chunk.write(ref, x)


def _sums(chosen: jax.Array, x: jax.Array) -> jax.Array:
    """f32[C, D]: for every row of bool[C, C] the sum of those x f32[C, D]."""
    ones = jnp.where(chosen, 1.0, 0.0).astype(jnp.bfloat16)
    largest, *rest = (plgpu.dot(ones, part) for part in parts(x, 3))
    return sum(rest) + largest


def decay_of(chunk: Chunk, whole: Any) -> Decay:
    """What `advance` takes beside decayed queries and keys."""
    channel = jnp.arange(tile_of(whole.shape[2]))
    mask = (channel < whole.shape[2]) & (chunk.number >= 0)
    over = plgpu.load(whole.at[chunk.number, chunk.head, channel], mask=mask, other=0.0)
    return Decay(1.0, 1.0, over[:, None])
