"""Decays per key channel within a chunk of tokens on TPU.

A query and an earlier key are parted by a pair of neighbouring blocks of 1, 2, 4, … tokens: the
query lies in the right one, the key in the left one. The query decays since the edge between them,
the key until it. So every width is one matrix product for all its pairs of blocks, and no exponent
is positive, however strong a decay is. The narrow ones share one product through the edge between
the widest of them: there a query grows until it is on its own side, and a decay of one token is
bounded so that this remains a number.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_rows
from pallas_kernels.tpu_chip import SUBLANES
from pallas_kernels.tpu_rows import CHUNK, F32

LARGEST = 76.0  # e^76 times a key is a number in float32, and in bfloat16


class ChannelDecay(NamedTuple):
    """The decays of a chunk for one head: since it began, between tokens, and until it ends."""

    growth: jax.Array  # f32[C, dk]
    scores: list[jax.Array]  # per left operand f32[C, C], 0 where the key is later
    rest: jax.Array  # f32[C, dk]
    whole: jax.Array  # f32[1, dk]

    @classmethod
    def of(
        cls, left: Sequence[jax.Array], keys: jax.Array, g: jax.Array, dtype: Any
    ) -> "ChannelDecay":
        """From left operands, keys and log decays g, f32[C, dk] each; products round to `dtype`.

        scores_ij = sum_d left_i[d] keys_j[d] e^(g_(j+1)[d] + ... + g_i[d]) for j <= i.
        """
        dot = tpu_rows.products(dtype)
        shared = SUBLANES // 2 if dtype == F32 else SUBLANES

        def tiled(x: jax.Array) -> jax.Array:
            return x.reshape(CHUNK // SUBLANES, SUBLANES, -1)

        def products(rows: Sequence[jax.Array], keys: jax.Array) -> list[jax.Array]:
            rows = [x.reshape(-1, x.shape[-1]) for x in rows]
            new = dot(jnp.concatenate(rows), keys.reshape(CHUNK, -1), transpose_rhs=True)
            return [x.reshape(-1, SUBLANES, CHUNK) for x in jnp.split(new, len(rows))]

        left, keys = [tiled(x) for x in left], tiled(keys)
        row = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0)
        column = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)
        lower, apart = tiled(row >= column), tiled(row ^ column)
        scores = []
        # Sums of g within a token's block: until the token itself, and after it.
        until = tiled(jnp.maximum(g, -LARGEST / shared))
        after = jnp.zeros_like(until)
        for bit in range(CHUNK.bit_length() - 1):
            width = 1 << bit
            pairs = (_PairsOfVectors if width >= SUBLANES else _PairsInVectors)(width)
            if width == shared:
                since = pairs.join(-pairs.left(after), pairs.right(until))
                weight = jnp.exp(since)
                new = products([x * weight for x in left], keys * jnp.exp(-since))
                scores = [jnp.where(lower & (apart < 2 * width), x, 0.0) for x in new]
            elif width > shared:
                weight = jnp.exp(pairs.join(pairs.left(after), pairs.right(until)))
                new = products([pairs.right(x * weight) for x in left], keys * weight)
                here = pairs.right(apart) >> bit == 1  # the highest bit is the width
                scores = [
                    pairs.join(
                        pairs.left(x), jnp.where(here, y.reshape(here.shape), pairs.right(x))
                    )
                    for x, y in zip(scores, new, strict=True)
                ]
            before, behind = pairs.neighbours(until + after)
            until, after = (
                pairs.join(pairs.left(until), pairs.right(until) + before),
                pairs.join(pairs.left(after) + behind, pairs.right(after)),
            )
        until, after, *scores = (x.reshape(CHUNK, -1) for x in (until, after, *scores))
        return cls(jnp.exp(until), scores, jnp.exp(after), jnp.exp(until[CHUNK - 1 :]))


class _PairsInVectors(NamedTuple):
    """Blocks of `width` tokens within vectors [n, 8, d]: left and right are all of them, masked."""

    width: int

    def left(self, x: jax.Array) -> jax.Array:
        return x

    def right(self, x: jax.Array) -> jax.Array:
        return x

    def join(self, left: jax.Array, right: jax.Array) -> jax.Array:
        sublane = lax.broadcasted_iota(jnp.int32, left.shape, 1)
        return jnp.where(sublane & self.width == 0, left, right)

    def neighbours(self, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sums of the blocks beside: of left ones for the right, of right ones for the left."""
        return pltpu.roll(total, self.width, 1), pltpu.roll(total, SUBLANES - self.width, 1)


class _PairsOfVectors(NamedTuple):
    """Blocks of `width` tokens that are whole vectors [n, 8, d]: [pairs, vectors, 8, d] each."""

    width: int

    def _halves(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, 2, self.width // SUBLANES, *x.shape[1:])

    def left(self, x: jax.Array) -> jax.Array:
        return self._halves(x)[:, 0]

    def right(self, x: jax.Array) -> jax.Array:
        return self._halves(x)[:, 1]

    def join(self, left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.stack([left, right], axis=1).reshape(-1, *left.shape[2:])

    def neighbours(self, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As above."""
        return self.left(total)[:, :1], self.right(total)[:, :1]
