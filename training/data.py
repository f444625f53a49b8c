"""Training batches: rows of the corpus and rows of packed recall documents.

A batch is a function of (seed, step, progress), so an interrupted run continues with the rows it
would have seen.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from training import recall
from training.config import BOS_ID, EOS_ID, SPECIAL_TOKENS

USER_ID, ASSISTANT_ID = SPECIAL_TOKENS.index("<|user|>"), SPECIAL_TOKENS.index("<|assistant|>")

RECALL_SHARE = 0.6
# A random string and its repetition: every second token is a copy, which teaches the circuit that
# recall needs much sooner than recall alone. Its share falls from the first to the second value.
ECHO_SHARE = (0.5, 0.05)
ECHO_LENGTHS = (6, 24)
CHAT_SHARE = 0.15
# A first mention's digits are noise, its name nearly so; the digits of an answer are the task.
DIGITS_WEIGHT, NAME_WEIGHT, TEXT_WEIGHT, ANSWER_WEIGHT = 0.0, 0.1, 1.0, 5.0
TOKENS_PER_FACT = 16
SHORTEST_DOCUMENT = 64
HARDEST_KEYS = 8
RAMP_END = 0.4

Tokens = list[tuple[int, float]]  # (token id, weight of predicting it)


@dataclass(frozen=True)
class Batch:
    """`tokens`, `targets` int32 [B, T]; `weights` float32 [B, T], the loss weight of a target."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class Difficulty:
    """Upper bounds from which each document draws its own size."""

    keys: int
    filler_tokens: int
    echo_share: float

    @staticmethod
    def at(progress: float, length: int) -> Difficulty:
        """Short documents with few keys first, the hardest from `RAMP_END` of the run on."""
        ramp = min(1.0, progress / RAMP_END)
        first, last = ECHO_SHARE
        return Difficulty(
            keys=2 + round((HARDEST_KEYS - 2) * ramp),
            filler_tokens=int(length * ramp),
            echo_share=first + (last - first) * ramp,
        )


class DataSource:
    """Draws batches; holds the tokenised corpus and its sentences."""

    def __init__(self, tokenizer: Tokenizer, chapters: Sequence[str], seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._stream = tokenise_corpus(tokenizer, chapters)
        self._sentences = [s for text in chapters for s in re.split(r"(?<=[.;:?!])\s+", text)]

    def batch(self, step: int, progress: float, rows: int, length: int) -> Batch:
        """The batch of `step`: `rows` x `length` tokens at the difficulty of `progress` (0..1)."""
        rng = random.Random(f"{self._seed}/{step}")
        drawn = [
            self._recall_row(rng, length + 1, Difficulty.at(progress, length))
            if rng.random() < RECALL_SHARE
            else self._corpus_row(rng, length + 1)
            for _ in range(rows)
        ]
        ids = np.array([[token for token, _ in row] for row in drawn], np.int32)
        weights = np.array([[weight for _, weight in row] for row in drawn], np.float32)
        return Batch(ids[:, :-1], ids[:, 1:], weights[:, 1:])

    def _encode(self, text: str, weight: float) -> Tokens:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [(token, weight) for token in ids]

    def _corpus_row(self, rng: random.Random, size: int) -> Tokens:
        start = rng.randrange(len(self._stream) - size)
        return [(int(token), TEXT_WEIGHT) for token in self._stream[start : start + size]]

    def _recall_row(self, rng: random.Random, size: int, difficulty: Difficulty) -> Tokens:
        """Pack whole documents; corpus text fills what is too short for another."""
        row: Tokens = []
        while (room := size - len(row)) >= SHORTEST_DOCUMENT:
            document = self._document(rng, room, difficulty)
            if len(document) > room:
                break
            row += document
        return row + self._corpus_row(rng, size - len(row))

    def _echo(self, rng: random.Random) -> Tokens:
        """A string of random tokens twice; only the repetition can be predicted."""
        lowest, highest = len(SPECIAL_TOKENS), self._tokenizer.get_vocab_size() - 1
        ids = [rng.randint(lowest, highest) for _ in range(rng.randint(*ECHO_LENGTHS))]
        once = [(token, DIGITS_WEIGHT) for token in ids]
        # The repetition's first token comes without a warning.
        return [
            (BOS_ID, 0.0),
            *once,
            *once[:1],
            *((t, TEXT_WEIGHT) for t in ids[1:]),
            (EOS_ID, 0.0),
        ]

    def _document(self, rng: random.Random, room: int, difficulty: Difficulty) -> Tokens:
        if rng.random() < difficulty.echo_share:
            return self._echo(rng)
        most = max(1, min(difficulty.keys, room // (4 * TOKENS_PER_FACT)))
        facts = recall.make_facts(rng, rng.randint(1, most))
        questions = [rng.choice(facts) for _ in range(rng.randint(1, len(facts) + 1))]
        spare = room - TOKENS_PER_FACT * (len(facts) + len(questions)) - 8
        filler = self._filler(rng, rng.randint(0, max(0, min(spare, difficulty.filler_tokens))))
        if rng.random() < CHAT_SHARE:
            return self._chat(rng, facts, questions, filler)
        return self._prose(rng, facts, questions, filler)

    def _filler(self, rng: random.Random, tokens: int) -> list[str]:
        """Consecutive corpus sentences, sometimes the task's own, of at most `tokens` tokens."""
        own = rng.random() < 0.25
        place = rng.randrange(len(self._sentences))
        filler: list[str] = []
        while True:
            sentence = (
                rng.choice(recall.FILLER)
                if own
                else self._sentences[(place + len(filler)) % len(self._sentences)]
            )
            tokens -= len(self._tokenizer.encode(f" {sentence}", add_special_tokens=False).ids)
            if tokens < 0:
                return filler
            filler.append(sentence)

    def _body(
        self, rng: random.Random, facts: list[recall.Fact], filler: list[str], space: str
    ) -> Tokens:
        """Facts scattered over filler; `space` precedes the first sentence."""
        body: Tokens = []
        for text, fact in recall.scatter(rng, facts, filler):
            if fact is None:
                body += self._encode(space + text, TEXT_WEIGHT)
            else:
                body += self._encode(space + fact.stem, NAME_WEIGHT)
                body += self._encode(f" {fact.digits}", DIGITS_WEIGHT)
                body += self._encode(".", TEXT_WEIGHT)
            space = " "
        return body

    def _answer(self, fact: recall.Fact, space: str) -> Tokens:
        stem = self._encode(space + fact.stem, NAME_WEIGHT)
        return stem + self._encode(f" {fact.digits}", ANSWER_WEIGHT) + self._encode(".", 1.0)

    def _prose(
        self,
        rng: random.Random,
        facts: list[recall.Fact],
        questions: list[recall.Fact],
        filler: list[str],
    ) -> Tokens:
        """Facts in filler, then the questions; some filler may stand before the questions."""
        late = rng.randint(0, len(filler)) if rng.random() < 0.5 else 0
        body = self._body(rng, facts, filler[late:], "")
        for sentence in filler[:late]:
            body += self._encode(f" {sentence}", TEXT_WEIGHT)
        for fact in questions:
            body += self._answer(fact, " ")
        return [(BOS_ID, 0.0), *body, (EOS_ID, TEXT_WEIGHT)]

    def _chat(
        self,
        rng: random.Random,
        facts: list[recall.Fact],
        questions: list[recall.Fact],
        filler: list[str],
    ) -> Tokens:
        """The same as turns of the chat template, one question a turn."""
        turns: Tokens = [(BOS_ID, 0.0), (USER_ID, 0.0), *self._body(rng, facts, filler, "")]
        for index, fact in enumerate(questions):
            turns += [] if index == 0 else [(USER_ID, TEXT_WEIGHT)]
            space = " " if index == 0 else ""
            turns += self._encode(f"{space}What is the key of {fact.name}?", NAME_WEIGHT)
            turns += [(EOS_ID, TEXT_WEIGHT), (ASSISTANT_ID, TEXT_WEIGHT)]
            turns += [*self._answer(fact, ""), (EOS_ID, TEXT_WEIGHT)]
        return turns


def tokenise_corpus(tokenizer: Tokenizer, chapters: Sequence[str]) -> np.ndarray:
    """All chapters in one int32 stream, each between <bos> and <eos>."""
    encoded = tokenizer.encode_batch(list(chapters), add_special_tokens=False)
    return np.array([t for e in encoded for t in (BOS_ID, *e.ids, EOS_ID)], np.int32)
