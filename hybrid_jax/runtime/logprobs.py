"""Log probabilities: of tokens that a step samples, and of the tokens of prompts.

Dimension letters: T tokens, S rows of logits, V vocabulary, K reported log probabilities.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hybrid_jax.runtime.vocabulary import BLOCK, CANDIDATE_BLOCK, blocks_of, largest_blocks

PROMPT_BLOCK = 32  # tokens of prompts at once, if a step has no more rows: enough to be no slower
# than the layers, and logits that weigh no more than those of the rows


class Logprobs(NamedTuple):
    """Log probabilities of given tokens, and the largest ones in their places."""

    chosen: jax.Array  # f32[S]
    top_ids: jax.Array  # i32[S, K] most likely first, ties by lowest id; -1: no more tokens
    top: jax.Array  # f32[S, K]

    @classmethod
    def none(cls, num_rows: int, count: int) -> "Logprobs":
        """What there is when nobody asked."""
        shape = (num_rows, count)
        ids = jnp.full(shape, -1, jnp.int32)
        return cls(jnp.zeros(num_rows, jnp.float32), ids, jnp.zeros(shape, jnp.float32))


def token_logprobs(logits: jax.Array, tokens: jax.Array, count: int) -> Logprobs:
    """Log-softmax of `logits` f32[S, V] at `tokens` i32[S] and at its `count` largest values."""
    num_rows, vocab = logits.shape
    top = logits.max(axis=1)
    sums = blocks_of(jnp.exp(logits - top[:, None]), BLOCK, 0.0).sum(axis=2).sum(axis=1)
    log_total = top + jnp.log(sums)
    logprob = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - log_total
    blocks = blocks_of(logits, CANDIDATE_BLOCK, -jnp.inf)
    num_blocks, size = blocks.shape[1:]
    if count < num_blocks:
        values, chosen, _ = largest_blocks(blocks, count)
    else:
        values = blocks.reshape(num_rows, -1)
        chosen = jnp.broadcast_to(jnp.arange(num_blocks)[None, :], (num_rows, num_blocks))
    kept = min(count, vocab)
    best, place = lax.top_k(values, kept)
    ids = jnp.take_along_axis(chosen, place // size, axis=1) * size + place % size
    missing = ((0, 0), (0, count - kept))
    return Logprobs(
        logprob,
        jnp.pad(ids.astype(jnp.int32), missing, constant_values=-1),
        jnp.pad(best - log_total[:, None], missing, constant_values=-jnp.inf),
    )


def prompt_logprobs(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    *,
    num_rows: int,
    count: int,
) -> Logprobs:
    """Log probabilities of the prompt tokens that come after tokens of a step.

    Args:
        logits_of: hidden states [n, D] -> f32[n, V].
        hidden: [T, D].
        targets: i32[T] the token that follows; -1: nobody asks for it, and any value comes out.
        num_rows: S; there are never logits of more than max(S, PROMPT_BLOCK) tokens at once.
        count: K.

    Returns:
        One entry per token. Nothing is computed if nobody asks.
    """
    num_tokens = targets.shape[0]
    block = min(num_tokens, max(num_rows, PROMPT_BLOCK))

    def one(part: tuple[jax.Array, jax.Array]) -> Logprobs:
        states, tokens = part
        return token_logprobs(logits_of(states), jnp.maximum(tokens, 0), count)

    def compute() -> Logprobs:
        missing = -num_tokens % block
        states = jnp.pad(hidden, ((0, missing), (0, 0))).reshape(-1, block, hidden.shape[1])
        found = lax.map(one, (states, jnp.pad(targets, (0, missing)).reshape(-1, block)))
        padded = num_tokens + missing
        flat = (x.reshape(padded, *x.shape[2:])[:num_tokens] for x in found)
        return Logprobs(*flat)

    return lax.cond(jnp.any(targets >= 0), compute, lambda: Logprobs.none(num_tokens, count))
