"""The recall task: facts ("The king gave Moses 4711."), filler text, then a question.

What a model answers depends on its own sequence's state alone, so exact match on this task is a
canary for state isolation: a state row, page or window that leaks between sequences changes the
digits. Standard library only; everything is a function of the `random.Random` passed in.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_NAMES = """
Aaron Abel Abner Abraham Absalom Adam Adonijah Ahab Ahaz Amaziah Amnon Amos Asa Asaph Asher
Azariah Baal Balaam Balak Barnabas Baruch Benaiah Benjamin Boaz Caesar Cain Caleb Canaan Cyrus
Dan Daniel Darius David Edom Eleazar Eli Eliab Elijah Elisha Enoch Ephraim Esau Esther Ezra
Gad Gedaliah Gideon Gilead Haman Hannah Herod Hezekiah Hilkiah Hiram Isaac Isaiah Ishmael
Jacob James Jehoiada Jehu Jephthah Jeremiah Jeroboam Jesse Jethro Joab Joash Job Joel John
Jonah Jonathan Joram Joseph Joshua Josiah Jotham Judah Judas Korah Laban Lazarus Leah Levi Lot
Luke Manasseh Mark Martha Mary Merari Micah Miriam Moab Mordecai Moses Naboth Nahum Naomi
Nathan Noah Obed Paul Peter Pharaoh Philip Phinehas Pilate Rachel Rebekah Reuben Ruth Samson
Samuel Sarah Saul Shem Silas Simeon Simon Solomon Stephen Tamar Thomas Timothy Uriah Uzziah
Zadok
"""
NAMES = tuple(_NAMES.split())  # each is one token of the bundled tokenizer
DIGITS = 4

FILLER = (
    "The river runs down to the sea.",
    "In the evening the men came home from the field.",
    "She gave bread to the poor and water to the stranger.",
    "The king sat in his house and spoke to no man.",
    "There was a great stone at the gate of the city.",
    "They went up early in the morning and took their journey.",
    "The old man told his sons what he had seen.",
    "And the people heard the sound of the trumpet.",
    "A small boat lay upon the shore.",
    "The servants made ready the table and the bed.",
    "No rain fell upon the land in those days.",
    "He planted a vineyard and built a tower in it.",
)


@dataclass(frozen=True)
class Fact:
    """One name and the digits to remember for it."""

    name: str
    digits: str

    @property
    def stem(self) -> str:
        """The sentence up to the answer, which follows its name at once: easiest to look up."""
        return f"The king gave {self.name}"


def make_facts(rng: random.Random, count: int, digits: str = "0123456789") -> list[Fact]:
    """`count` facts with distinct names and numbers of `digits`, which may start with zero."""
    names = rng.sample(NAMES, count)
    return [Fact(name, "".join(rng.choice(digits) for _ in range(DIGITS))) for name in names]


def scatter(
    rng: random.Random, facts: Sequence[Fact], filler: Sequence[T]
) -> list[tuple[T | str, Fact | None]]:
    """Spread the facts over the filler sentences in random places; filler keeps its order."""
    places = sorted(rng.randint(0, len(filler)) for _ in facts)
    pieces: list[tuple[T | str, Fact | None]] = []
    done = 0
    for place, fact in zip(places, facts, strict=True):
        pieces += [(sentence, None) for sentence in filler[done:place]]
        pieces.append((f"{fact.stem} {fact.digits}.", fact))
        done = place
    return pieces + [(sentence, None) for sentence in filler[done:]]


def make_prompt(
    rng: random.Random,
    num_keys: int = 3,
    filler_words: int = 120,
    sentences: Sequence[str] = FILLER,
) -> tuple[str, str]:
    """Return `(prompt, answer)`; the answer is the prompt's greedy continuation.

    Args:
        rng: the only source of randomness.
        num_keys: facts in the prompt; the question asks for one of them.
        filler_words: words of filler, at least; about 1.25 tokens a word.
        sentences: where the filler is drawn from.
    """
    filler: list[str] = []
    words = 0
    while words < filler_words:
        filler.append(rng.choice(sentences))
        words += len(filler[-1].split())
    facts = make_facts(rng, num_keys)
    asked = rng.choice(facts)
    body = " ".join(text for text, _ in scatter(rng, facts, filler))
    return f"{body} {asked.stem}", f" {asked.digits}"
