"""What a model is asked when nobody brings prompts of their own."""

import numpy as np

from hybrid_jax.tokenizer import HFTokenizer

TEXTS = (
    "The capital of France is",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n",
    "Question: A train leaves at 9:40 and arrives at 11:15. How long does it travel?\nAnswer:",
    "Les sanglots longs des violons de l'automne",
    '{"name": "Ada", "born": 1815, "languages": ["en", "fr"]}\n{"name": "Alan", "born":',
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the "
    "age of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the "
    "season of Light, it was the season of Darkness, it was the spring of hope, it was the",
)
# Repeated with other numbers, since a document that says the same twice is no test of memory.
_ENTRY = (
    "Entry {}. The ship kept its course to the north; the wind turned at noon, and by evening {} "
    "barrels of water and {} sacks of flour were left. The captain wrote that nobody was ill.\n"
)
_RANDOM_LENGTHS = (5, 17, 23, 40, 65, 90)


def short_prompts(tokenizer: HFTokenizer | None, vocab_size: int) -> list[list[int]]:
    """A handful of prompts of different lengths; without a tokenizer, random token ids."""
    if tokenizer is not None:
        return [tokenizer.encode(text) for text in TEXTS]
    return [_random(length, vocab_size) for length in _RANDOM_LENGTHS]


def long_prompt(tokenizer: HFTokenizer | None, vocab_size: int, length: int) -> list[int]:
    """A document of so many tokens."""
    if tokenizer is None:
        return _random(length, vocab_size)
    entries = "".join(
        _ENTRY.format(i, 1000 - 7 * i % 1000, 13 * i % 100) for i in range(1, length // 32 + 2)
    )
    return tokenizer.encode(entries)[:length]


def _random(length: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(length).integers(vocab_size, size=length).tolist()
