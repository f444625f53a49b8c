"""Decays per key channel within a chunk of tokens on TPU.

A query and an earlier key are parted by a pair of neighbouring blocks of 1, 2, 4, … tokens: the
query lies in the right one, the key in the left one. The query decays since the edge between them,
the key until it. So every width is one matrix product for all its pairs of blocks, and no exponent
is positive, however strong a decay is.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_rows import CHUNK

SUBLANES = 8  # tokens in a vector


class ChannelDecay(NamedTuple):
    """The decays of a chunk for one head: since it began, between tokens, and until it ends."""

    growth: jax.Array  # f32[C, dk]
    scores: list[jax.Array]  # per left operand f32[C, C], 0 where the key is later
    rest: jax.Array  # f32[C, dk]
    whole: jax.Array  # f32[1, dk]

    @classmethod
    def of(
        cls, left: Sequence[jax.Array], keys: jax.Array, g: jax.Array, dot: Callable[..., jax.Array]
    ) -> "ChannelDecay":
        """From log decays g, left operands and keys, f32[C, dk] each; `dot` is of `products`.

        scores_ij = sum_d left_i[d] keys_j[d] e^(g_(j+1)[d] + ... + g_i[d]) for j <= i.
        """

        def tiled(x: jax.Array) -> jax.Array:
            return x.reshape(CHUNK // SUBLANES, SUBLANES, -1)

        def products(rows: Sequence[jax.Array], keys: jax.Array) -> list[jax.Array]:
            rows = [x.reshape(-1, x.shape[-1]) for x in rows]
            new = dot(jnp.concatenate(rows), keys.reshape(CHUNK, -1), transpose_rhs=True)
            return [x.reshape(-1, SUBLANES, CHUNK) for x in jnp.split(new, len(rows))]

        left, keys, g = [tiled(x) for x in left], tiled(keys), tiled(g)
        row = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0)
        column = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)
        apart = tiled(row ^ column)  # its highest bit is the width of the blocks that part them
        scores = [jnp.where(apart == 0, x, 0.0) for x in products(left, keys)]
        # Sums of g within a token's block: until the token itself, and after it.
        until, after = g, jnp.zeros_like(g)
        for bit in range(CHUNK.bit_length() - 1):
            pairs = (_PairsOfVectors if 1 << bit >= SUBLANES else _PairsInVectors)(1 << bit)
            weight = jnp.exp(pairs.join(pairs.left(after), pairs.right(until)))
            new = products([pairs.right(x * weight) for x in left], keys * weight)
            here = pairs.right(apart) >> bit == 1
            scores = [
                pairs.join(pairs.left(x), jnp.where(here, y.reshape(here.shape), pairs.right(x)))
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
