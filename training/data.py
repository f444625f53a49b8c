"""Training batches: rows of the corpus and rows of packed recall documents.

A batch is a function of (seed, step, stage), so an interrupted run continues with the rows it
would have seen.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from tokenizers import Tokenizer

from training import recall
from training.config import BOS_ID, EOS_ID, SPECIAL_TOKENS
from training.curriculum import Stage

USER_ID, ASSISTANT_ID = SPECIAL_TOKENS.index("<|user|>"), SPECIAL_TOKENS.index("<|assistant|>")

# Weights of predicting a token: a first mention's digits and every name are noise, the words of a
# stem are nearly so; the digits of an answer are the task.
NOISE_WEIGHT, STEM_WEIGHT, TEXT_WEIGHT, ANSWER_WEIGHT = 0.0, 0.1, 1.0, 10.0
OWN_FILLER_SHARE = 0.5
LATE_FILLER_SHARE = 0.6
TOKENS_PER_FACT = 9
SHORTEST_ROOM = 40
DRILL_LENGTHS = (80, 160)

Tokens = list[tuple[int, float]]  # (token id, weight of predicting it)


@dataclass(frozen=True)
class Batch:
    """`tokens`, `targets` int32 [B, T]; `weights` float32 [B, T], the loss weight of a target."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


class DataSource:
    """Draws batches; holds the tokenised corpus and its sentences."""

    def __init__(self, tokenizer: Tokenizer, chapters: Sequence[str], seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._stream = tokenise_corpus(tokenizer, chapters)
        sentences = [s for text in chapters for s in re.split(r"(?<=[.;:?!])\s+", text)]
        self._sentences = self._encode_all(sentences)
        self._own = self._encode_all(recall.FILLER)
        self._encode = cache(self._encode_ids)

    def batch(self, step: int, stage: Stage) -> Batch:
        """The batch of `step`: `stage.rows` x `stage.length` tokens."""
        rng = random.Random(f"{self._seed}/{step}")
        drawn = [
            self._corpus_row(rng, stage.length + 1)
            # A share, not a chance: every batch holds the same number of either kind.
            if row < round(stage.rows * stage.text)
            else self._recall_row(rng, stage.length + 1, stage)
            for row in range(stage.rows)
        ]
        ids = np.array([[token for token, _ in row] for row in drawn], np.int32)
        weights = np.array([[weight for _, weight in row] for row in drawn], np.float32)
        return Batch(ids[:, :-1], ids[:, 1:], weights[:, 1:])

    def _encode_all(self, sentences: Sequence[str]) -> list[list[int]]:
        texts = [f" {sentence}" for sentence in sentences]
        return [e.ids for e in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def _encode_ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _corpus_row(self, rng: random.Random, size: int) -> Tokens:
        start = rng.randrange(len(self._stream) - size)
        return [(int(token), TEXT_WEIGHT) for token in self._stream[start : start + size]]

    def _recall_row(self, rng: random.Random, size: int, stage: Stage) -> Tokens:
        """Pack whole documents; corpus text fills what is too short for another."""
        row: Tokens = []
        while (room := size - len(row)) >= SHORTEST_ROOM:
            if rng.random() < stage.drill:
                row += self._drill(rng, min(room, rng.randint(*DRILL_LENGTHS)), stage)
                continue
            document = self._document(rng, room, stage)
            if len(document) > room:
                break
            row += document
        return row + (self._corpus_row(rng, room) if room else [])

    def _facts(self, rng: random.Random, count: int, stage: Stage) -> list[recall.Fact]:
        kinds = rng.randint(2, 4) if rng.random() < stage.alike else 10
        return recall.make_facts(rng, count, "".join(rng.sample("0123456789", kinds)))

    def _drill(self, rng: random.Random, room: int, stage: Stage) -> Tokens:
        """Facts, then nothing but questions for `room` tokens, in random order."""
        facts = self._facts(rng, rng.randint((stage.keys + 1) // 2, stage.keys), stage)
        body: Tokens = []
        pending = list(facts)
        known: list[recall.Fact] = []
        while len(body) < room:
            if pending and (not known or rng.random() < 0.5):
                known.append(pending.pop())
                body += self._statement(known[-1])
            else:
                body += self._answer(rng.choice(known))
        return [(BOS_ID, NOISE_WEIGHT), *self._as_start(body)][:room]

    def _document(self, rng: random.Random, room: int, stage: Stage) -> Tokens:
        most = max(1, min(stage.keys, (room - 8) // (3 * TOKENS_PER_FACT)))
        facts = self._facts(rng, rng.randint(1, most), stage)
        spare = room - TOKENS_PER_FACT * len(facts) - 8
        # Each fact is asked for once: a second answer could be copied from the first.
        count = max(1, min(len(facts), stage.questions, spare // (2 * TOKENS_PER_FACT)))
        questions = rng.sample(facts, count)
        spare -= TOKENS_PER_FACT * count
        filler = self._filler(rng, rng.randint(0, max(0, min(spare, stage.filler))))
        if rng.random() < stage.chat:
            return self._chat(rng, facts, questions, filler)
        return self._prose(rng, facts, questions, filler)

    def _filler(self, rng: random.Random, tokens: int) -> list[list[int]]:
        """Consecutive corpus sentences, sometimes the task's own, of at most `tokens` tokens."""
        own = rng.random() < OWN_FILLER_SHARE
        place = rng.randrange(len(self._sentences))
        filler: list[list[int]] = []
        while True:
            following = self._sentences[(place + len(filler)) % len(self._sentences)]
            sentence = rng.choice(self._own) if own else following
            tokens -= len(sentence)
            if tokens < 0:
                return filler
            filler.append(sentence)

    def _stem(self, fact: recall.Fact, space: str = " ") -> Tokens:
        words = [(token, STEM_WEIGHT) for token in self._encode(f"{space}{fact.stem}")]
        name = self._encode(f" {fact.name}")
        return words[: -len(name)] + [(token, NOISE_WEIGHT) for token in name]

    def _statement(self, fact: recall.Fact) -> Tokens:
        """A fact's first mention."""
        digits = [(token, NOISE_WEIGHT) for token in self._encode_ids(f" {fact.digits}")]
        return [*self._stem(fact), *digits, (self._encode(".")[0], STEM_WEIGHT)]

    def _answer(self, fact: recall.Fact, space: str = " ") -> Tokens:
        """A question and its answer: the same sentence, its digits now predictable."""
        digits = [(token, ANSWER_WEIGHT) for token in self._encode_ids(f" {fact.digits}")]
        return [*self._stem(fact, space), *digits, (self._encode(".")[0], TEXT_WEIGHT)]

    def _as_start(self, body: Tokens) -> Tokens:
        """`body` without the space in front of its first word."""
        token, weight = body[0]
        word = self._encode(self._tokenizer.decode([token]).lstrip())
        return [(t, weight) for t in word] + body[1:]

    def _body(
        self, rng: random.Random, facts: list[recall.Fact], filler: list[list[int]]
    ) -> Tokens:
        """Facts scattered over filler."""
        body: Tokens = []
        for sentence, fact in recall.scatter(rng, facts, filler):
            if fact is None:
                body += [(token, TEXT_WEIGHT) for token in sentence]
            else:
                body += self._statement(fact)
        return body

    def _prose(
        self,
        rng: random.Random,
        facts: list[recall.Fact],
        questions: list[recall.Fact],
        filler: list[list[int]],
    ) -> Tokens:
        """Facts in filler, then the questions; some filler may stand before or between them."""
        late = rng.randint(0, len(filler)) if rng.random() < LATE_FILLER_SHARE else 0
        body = self._body(rng, facts, filler[late:])
        between = rng.random() < 0.5
        rest = filler[:late]
        for index, fact in enumerate(questions):
            last = index + 1 == len(questions)
            taken = rng.randint(0, len(rest)) if between and not last else len(rest)
            body += [(token, TEXT_WEIGHT) for sentence in rest[:taken] for token in sentence]
            rest = rest[taken:]
            body += self._answer(fact)
        return [(BOS_ID, NOISE_WEIGHT), *self._as_start(body), (EOS_ID, TEXT_WEIGHT)]

    def _chat(
        self,
        rng: random.Random,
        facts: list[recall.Fact],
        questions: list[recall.Fact],
        filler: list[list[int]],
    ) -> Tokens:
        """The same as turns of the chat template, one question a turn."""
        body = self._as_start(self._body(rng, facts, filler))
        turns: Tokens = [(BOS_ID, NOISE_WEIGHT), (USER_ID, NOISE_WEIGHT), *body]
        for index, fact in enumerate(questions):
            turns += [] if index == 0 else [(USER_ID, TEXT_WEIGHT)]
            space = " " if index == 0 else ""
            words = self._encode(f"{space}What did the king give {fact.name}?")
            turns += [(token, STEM_WEIGHT) for token in words]
            turns += [(EOS_ID, TEXT_WEIGHT), (ASSISTANT_ID, TEXT_WEIGHT)]
            turns += [*self._answer(fact, ""), (EOS_ID, TEXT_WEIGHT)]
        return turns


def tokenise_corpus(tokenizer: Tokenizer, chapters: Sequence[str]) -> np.ndarray:
    """All chapters in one int32 stream, each between <bos> and <eos>."""
    encoded = tokenizer.encode_batch(list(chapters), add_special_tokens=False)
    return np.array([t for e in encoded for t in (BOS_ID, *e.ids, EOS_ID)], np.int32)
