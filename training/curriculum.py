"""The stages of training: what a batch holds at each, and when the next one begins.

Recall is a circuit that a model finds suddenly, and only if questions are dense: it starts with
nothing but facts and repetitions of them. Distance, filler and plain text come once that works.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """`rows` x `length` tokens a batch; the other values bound what a document draws.

    keys: most facts of a document; one without filler has at least half as many.
    filler: most filler tokens of a document.
    questions: most questions of a document with filler, each for another fact; one without filler
        is filled with questions.
    text: share of rows that are plain corpus text.
    drill: share of documents without filler.
    alike: share of documents whose numbers have few different digits, so that the digits before
        a digit do not tell which fact it belongs to.
    chat: share of documents with filler that are written as a chat.
    passing: accuracy of single answer digits that ends the stage; 0.97 ** 4 = 0.89 of the answers.
    """

    rows: int
    length: int
    keys: int
    filler: int = 0
    questions: int = 1
    text: float = 0.0
    drill: float = 1.0
    alike: float = 0.0
    chat: float = 0.0
    passing: float = 0.97


STAGES = (
    Stage(8, 128, keys=4, passing=0.93),
    Stage(8, 256, keys=4, filler=150, questions=8, text=0.25, drill=0.3, passing=0.96),
    Stage(8, 256, keys=5, filler=170, questions=8, text=0.375, drill=0.3, passing=0.93),
    Stage(8, 128, keys=4, filler=60, questions=8, text=0.25, drill=0.6, alike=0.7, passing=0.98),
    Stage(4, 512, 5, filler=380, questions=8, text=0.5, drill=0.3, alike=0.4, passing=0.95),
    Stage(8, 256, keys=5, filler=190, questions=8, text=0.25, drill=0.4, alike=0.6, chat=0.1),
)
WINDOW = 25  # steps whose accuracy is averaged


def next_stage(stage: int, accuracies: list[float]) -> int:
    """The stage after `stage` once the newest accuracies of the current one are good enough."""
    newest = accuracies[-WINDOW:]
    passed = len(newest) == WINDOW and sum(newest) / WINDOW > STAGES[stage].passing
    return min(stage + 1, len(STAGES) - 1) if passed else stage
