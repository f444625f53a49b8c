"""Reductions over a large vocabulary that XLA does slowly when asked plainly: argmax, top-k, draw.

Everything works on blocks of the vocabulary first, then on the few blocks that matter.
Dimension letters: S rows, V vocabulary, A blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 512  # values per block of a two-level reduction: the fastest of 64 to 2,048 on XLA:CPU
CANDIDATE_BLOCK = 128
CANDIDATE_BLOCKS = 256  # any kept set of up to this many tokens is found without a full search
_INT32_MAX = 2**31 - 1


def draw(weights: jax.Array, seed: jax.Array, seq_lens: jax.Array) -> jax.Array:
    """i32[S]: an exact draw proportional to `weights` f32[S, V], by Gumbel-max in two levels.

    argmax(log w + Gumbel noise) is distributed as w (Maddison et al., arXiv:1411.0030). First a
    block is drawn by its total weight, then a token of the block by its own. That needs
    A + V / A random numbers per row instead of V, whose generation took 100 ms at S 16,
    V 262,144 on two CPU cores, longer than a small model's whole step.
    """
    blocks = blocks_of(weights, BLOCK, 0.0)
    num_blocks, size = blocks.shape[1:]

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (num_blocks + size,), jnp.float32)

    gumbel = jax.vmap(noise)(seed, seq_lens)
    block = jnp.argmax(jnp.log(blocks.sum(axis=2)) + gumbel[:, :num_blocks], axis=1)
    inner = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token = block * size + jnp.argmax(jnp.log(inner) + gumbel[:, num_blocks:], axis=1)
    # The padding of the last block has weight 0; only NaN could select it.
    return jnp.minimum(token, weights.shape[1] - 1).astype(jnp.int32)


def all_finite(logits: jax.Array) -> jax.Array:
    """bool[S]: no NaN or Inf in f32[S, V]. Sums down columns first, which XLA:CPU vectorises."""
    rows, width = logits.shape
    even = width - width % BLOCK
    total = logits[:, :even].reshape(rows, even // BLOCK, BLOCK).sum(axis=1).sum(axis=1)
    return jnp.isfinite(total + logits[:, even:].sum(axis=1))


def argmax(x: jax.Array) -> jax.Array:
    """i32[S]: index of the largest of x f32[S, V] per row; the lowest on ties, as `jnp.argmax`.

    Two levels, because XLA:CPU vectorises a maximum but not an argmax: at S 16, V 262,144 the
    one-level form took 30 to 40 ms, this one 0.3 ms. A row with NaN gets some index below V
    (whether a maximum sees NaN differs between XLA's implementations).
    """
    blocks = blocks_of(x, BLOCK, -jnp.inf)
    block = jnp.argmax(blocks.max(axis=2), axis=1)
    inner = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    index = block * blocks.shape[2] + jnp.argmax(inner, axis=1)
    return jnp.minimum(index, x.shape[1] - 1).astype(jnp.int32)  # NaN could select the padding


def keep_allowed(logits: jax.Array, words: jax.Array) -> jax.Array:
    """f32[S, V]: the logits of tokens whose bit is set in `words` i32[S, ceil(V / 32)], or -inf."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
    allowed = bits.reshape(words.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(allowed == 1, logits, -jnp.inf)


def blocks_of(x: jax.Array, most: int, fill: float) -> jax.Array:
    """x f32[S, V] as f32[S, A, size], padded with `fill` if no size of 64 to `most` divides V."""
    vocab = x.shape[1]
    size = most
    while size > 64 and vocab % size:
        size //= 2
    if vocab % size:
        size = most
        x = jnp.pad(x, ((0, 0), (0, -vocab % size)), constant_values=fill)
    return x.reshape(x.shape[0], -1, size)


class Candidates(NamedTuple):
    """The blocks of a row that hold its largest values."""

    values: jax.Array  # f32[S, count * size], in the order of their indices
    blocks: jax.Array  # i32[S, count] ascending
    bound: jax.Array  # f32[S] no value outside is larger


def largest_blocks(blocks: jax.Array, count: int) -> Candidates:
    """The `count` < A blocks of f32[S, A, size] with the largest maxima.

    They hold the `count` largest values: each value outside is preceded by the maxima of all
    of them. On ties lower indices come first, here and there.
    """
    # The barriers keep XLA from moving the slices below into top_k, which would turn it into a
    # full sort: 8 ms in place of 1 ms at S 16, V 262,144 on CPU. One for each result: XLA's
    # partitioner dies of a barrier that takes what top_k returns as a whole.
    maxima, order = map(lax.optimization_barrier, lax.top_k(blocks.max(axis=2), count + 1))
    # Ascending, so that a value's place among the candidates still breaks ties by its index.
    chosen = jnp.sort(order[:, :count], axis=1)
    values = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1)
    return Candidates(values.reshape(values.shape[0], -1), chosen, maxima[:, count])


def cutoff(logits: jax.Array, weights: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """f32[S]: the smallest logit that top-k and top-p keep; -inf when both are off.

    Args:
        logits: f32[S, V].
        weights: f32[S, V] ascending with the logits; 0 where min-p removed the token.
        top_k: i32[S]; 0: off.
        top_p: f32[S]; 1: off.

    The search reads its data about 30 times, so it looks at the candidate blocks only, which
    is enough unless a kept set is large and scattered; then everything is searched.
    """

    def total(cut: jax.Array) -> jax.Array:
        return _mass(logits, weights, cut)

    def full() -> jax.Array:
        bound = jnp.full(logits.shape[0], -jnp.inf, jnp.float32)
        return _search(logits, weights, bound, top_k, top_p, total)

    blocks = blocks_of(logits, CANDIDATE_BLOCK, -jnp.inf)
    if blocks.shape[1] <= CANDIDATE_BLOCKS:
        return full()
    found = largest_blocks(blocks, CANDIDATE_BLOCKS)
    near = jnp.take_along_axis(
        blocks_of(weights, CANDIDATE_BLOCK, 0.0), found.blocks[:, :, None], axis=1
    ).reshape(found.values.shape)
    cut = _search(found.values, near, found.bound, top_k, top_p, total)
    # A top-p cut at the bound may mean that tokens outside were missed. A top-k cut may lie
    # there by ties, but is right: the candidates hold the CANDIDATE_BLOCKS largest logits.
    enough = (top_k <= CANDIDATE_BLOCKS) & ((top_p >= 1.0) | (cut > found.bound))
    return lax.cond(jnp.all(enough), lambda: cut, full)


def _search(
    logits: jax.Array,
    weights: jax.Array,
    bound: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    total: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """f32[S]: the top-k and top-p cut among `logits`, at least `bound` where either is on."""

    def count(cut: jax.Array) -> jax.Array:
        return jnp.sum(logits >= cut[:, None], axis=1, dtype=jnp.int32)

    high = logits.max(axis=1)
    by_count = _bisect(count, top_k, bound, high, top_k > 0)
    by_mass = _bisect(
        # The cut by count is applied first: tokens below it have no mass.
        lambda cut: _mass(logits, weights, jnp.maximum(cut, by_count)),
        top_p * total(by_count),
        bound,
        high,
        top_p < 1.0,
    )
    return jnp.maximum(by_count, by_mass)


def _mass(logits: jax.Array, weights: jax.Array, cut: jax.Array) -> jax.Array:
    """f32[S]: the weight of all logits from `cut` upwards."""
    return jnp.sum(jnp.where(logits >= cut[:, None], weights, 0.0), axis=1)


def _bisect(
    measure: Callable[[jax.Array], jax.Array],
    target: jax.Array,
    low: jax.Array,
    high: jax.Array,
    wanted: jax.Array,
) -> jax.Array:
    """f32[S]: the largest cut in [low, high] with measure(cut) >= target; -inf if not `wanted`.

    `measure` falls as the cut rises. The bisection runs over the integers that order float32, so
    it ends after at most 32 steps with the exact value of a logit, or sooner with a cut that
    keeps the same tokens.
    """
    start = jnp.where(wanted, _to_key(low), _to_key(high))

    def unfinished(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        step, low, high = state
        return (step < 32) & jnp.any(low + 1 < high)

    def halve(
        state: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        step, low, high = state
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        value = measure(_from_key(middle))
        met = (value >= target) & (low + 1 < high)
        # At equality the cut keeps exactly the wanted tokens: no larger one keeps more.
        high = jnp.where(met & (value == target), middle + 1, jnp.where(met, high, middle))
        return step + 1, jnp.where(met, middle, low), jnp.maximum(high, low + 1)

    _, found, _ = lax.while_loop(unfinished, halve, (jnp.int32(0), start, _to_key(high) + 1))
    return jnp.where(wanted, _from_key(found), -jnp.inf)


def _to_key(x: jax.Array) -> jax.Array:
    """i32 that orders as the f32 `x` does (Herf, "Radix tricks", 2001); NaN counts as -inf."""
    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(x), -jnp.inf, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ _INT32_MAX, bits)


def _from_key(key: jax.Array) -> jax.Array:
    """The f32 behind a key of `_to_key`."""
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ _INT32_MAX, key), jnp.float32)
