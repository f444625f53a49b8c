"""Held-out perplexity and recall accuracy of a forward pass."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from training import recall
from training.config import BOS_ID, PAD_ID
from training.data import tokenise_corpus
from training.forward import Forward, Tensors

# (facts, words of filler): from next to the question to many windows away.
RECALL_LEVELS = ((1, 50), (1, 200), (2, 100), (2, 200), (3, 200), (4, 50), (4, 200), (6, 200))
ROWS, LENGTH = 16, 512


class Evaluator:
    """Fixed evaluation inputs and a compiled forward pass, `[ROWS, LENGTH]` tokens at a time."""

    def __init__(
        self,
        forward: Forward,
        tokenizer: Tokenizer,
        held_out: Sequence[str],
        levels: Sequence[tuple[int, int]] = RECALL_LEVELS,
        seed: int = 1,
    ) -> None:
        self._tokenizer = tokenizer
        self._levels = levels
        self._seed = seed
        # Only reductions leave the device: the logits of a whole batch are large.
        self._losses = jax.jit(lambda t, x: _next_token_losses(forward(t, x), x))
        self._argmax = jax.jit(lambda t, x: jnp.argmax(forward(t, x), axis=-1))
        stream = tokenise_corpus(tokenizer, held_out)
        self._rows = stream[: len(stream) // LENGTH * LENGTH].reshape(-1, LENGTH)

    def perplexity(self, tensors: Tensors, max_batches: int | None = None) -> float:
        """Per-token perplexity on the held-out chapters, in separate rows of `LENGTH`."""
        batches = len(self._rows) // ROWS
        batches = batches if max_batches is None else min(batches, max_batches)
        total = sum(
            float(self._losses(tensors, self._rows[i * ROWS : (i + 1) * ROWS]).mean())
            for i in range(batches)
        )
        return math.exp(total / batches)

    def recall(self, tensors: Tensors, num_keys: int, words: int, count: int) -> float:
        """Share of `count` prompts whose whole greedy answer is right.

        A greedy answer is right exactly if every answer token is the argmax behind the right
        prefix, so one forward pass replaces token-by-token decoding.
        """
        rng = random.Random(f"{self._seed}/{num_keys}/{words}")
        right = 0
        for start in range(0, count, ROWS):
            tokens = np.full((ROWS, LENGTH), PAD_ID, np.int32)
            spans: list[tuple[int, int]] = []
            for row in tokens[: min(ROWS, count - start)]:
                prompt, answer = recall.make_prompt(rng, num_keys, words)
                head, tail = (
                    self._tokenizer.encode(text, add_special_tokens=False).ids
                    for text in (prompt, answer)
                )
                ids = [BOS_ID, *head, *tail]
                row[: len(ids)] = ids
                spans.append((len(ids) - len(tail), len(ids)))
            predicted = np.asarray(self._argmax(tensors, tokens))
            right += sum(
                bool((predicted[i, a - 1 : b - 1] == tokens[i, a:b]).all())
                for i, (a, b) in enumerate(spans)
            )
        return right / count

    def report(self, tensors: Tensors, count: int, max_batches: int | None = None) -> dict:
        """Perplexity and the recall accuracy of every level, as JSON values."""
        levels = {
            f"recall_{keys}_keys_{words}_words": self.recall(tensors, keys, words, count)
            for keys, words in self._levels
        }
        return {"held_out_perplexity": self.perplexity(tensors, max_batches), **levels}


def _next_token_losses(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Cross entropy [B, T - 1] of each next token under logits [B, T, V]."""
    log_probs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32), axis=-1)
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
