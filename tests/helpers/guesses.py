"""Guesses for speculative decoding that are as good as a test wants them."""

import random
from collections.abc import Iterable, Sequence


class Scripted:
    """Guesses what will come, but each guess is wrong with some probability; or makes none.

    `texts` are prompts with what follows them. Of several that go on from the same tokens, such as
    the completions of one request, any will do.
    """

    def __init__(
        self,
        texts: Iterable[Sequence[int]],
        right: float,
        none: float = 0.0,
        *,
        seed: int | str = 0,
        vocab_size: int = 128,
    ) -> None:
        self.texts = [tuple(text) for text in texts]
        self.right, self.none, self.vocab_size = right, none, vocab_size
        self.rng = random.Random(seed)

    def __call__(self, token_ids: Sequence[int], count: int) -> list[int]:
        if self.rng.random() < self.none:
            return []
        known = tuple(token_ids)
        text = self.rng.choice([text for text in self.texts if text[: len(known)] == known])
        guesses = text[len(known) : len(known) + count]
        return [t if self.rng.random() < self.right else (t + 1) % self.vocab_size for t in guesses]
