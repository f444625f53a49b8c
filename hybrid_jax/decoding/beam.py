"""Beam search: forks of a session, of which the most likely go on.

The rules, and so tokens and scores, are those of Hugging Face's `generate(num_beams=...)`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_jax.decoding.sampling import log_softmax
from hybrid_jax.decoding.session import Session
from hybrid_jax.errors import InvalidRequest


@dataclass(frozen=True)
class Hypothesis:
    """A finished continuation."""

    token_ids: list[int]
    score: float  # sum of log probabilities / length ** length_penalty


@dataclass(frozen=True, eq=False)
class Beam:
    """A continuation that goes on. Its session has not been fed the last token."""

    session: Session
    token_ids: list[int]
    logprob: float


class BeamGroup:
    """Beams that compete with each other."""

    def __init__(
        self,
        session: Session,
        width: int,
        *,
        stop_ids: Iterable[int] | None,
        length_penalty: float,
        early_stopping: bool,
    ) -> None:
        if width < 1:
            raise InvalidRequest(f"a beam search needs at least one beam, got {width}")
        self.width = width
        self.stop_ids = set(session.stop_ids if stop_ids is None else stop_ids)
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.running = [Beam(session, [], 0.0)]
        self.done: list[Hypothesis] = []

    def choose(self, *, last: bool, penalty: np.ndarray | float = 0.0) -> list[int]:
        """Every beam's session knows its next logits: the best continuations become the beams.

        Args:
            last: whether everything ends with this token.
            penalty: f32[V], subtracted where tokens are chosen, but not in scores.

        Returns:
            The tokens of the `width` best, whether they end a continuation or not.
        """
        logprobs = np.stack([b.logprob + log_softmax(b.session.next_logits) for b in self.running])
        # So many that `width` are left when all others end.
        most = max(2, 1 + len(self.stop_ids)) * self.width
        order = np.argsort(-(logprobs - penalty), axis=None, kind="stable")[:most]
        candidates = []
        for beam, token in zip(*np.unravel_index(order, logprobs.shape), strict=True):
            parent = self.running[beam]
            tokens = [*parent.token_ids, int(token)]
            candidates.append(Beam(parent.session, tokens, float(logprobs[beam, token])))
        ends = [last or beam.token_ids[-1] in self.stop_ids for beam in candidates]
        # What ends further down the list would not have gone on either.
        for beam, end in list(zip(candidates, ends, strict=True))[: self.width]:
            if end:
                self.done.append(Hypothesis(beam.token_ids, self._score(beam)))
        self.done = sorted(self.done, key=lambda h: -h.score)[: self.width]
        going = [beam for beam, end in zip(candidates, ends, strict=True) if not end][: self.width]
        self.running = [] if self._over(going) else going
        return [beam.token_ids[-1] for beam in candidates[: self.width]]

    def _over(self, going: list[Beam]) -> bool:
        """Whether no beam that goes on is expected to end better than those that have ended."""
        if not going or len(self.done) < self.width:
            return False
        return self.early_stopping or self._score(going[0]) <= self.done[-1].score

    def _score(self, beam: Beam) -> float:
        return beam.logprob / len(beam.token_ids) ** self.length_penalty


def advance(groups: Sequence[BeamGroup]) -> None:
    """Feeds the chosen tokens of all groups in one step, each to a fork of its own."""
    beams = [beam for group in groups for beam in group.running]
    if not beams:
        return
    forks = [beam.session.fork(1)[0] for beam in beams]
    beams[0].session.workspace.decode(forks, [beam.token_ids[-1] for beam in beams])
    chosen = iter(forks)
    for group in groups:  # the parents are garbage now, and with them what only they held
        group.running = [Beam(next(chosen), b.token_ids, b.logprob) for b in group.running]


def beam_search(
    session: Session,
    *,
    num_beams: int = 4,
    max_tokens: int = 16,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    stop_ids: Iterable[int] | None = None,
) -> list[Hypothesis]:
    """The most likely continuations that a beam search finds, best first.

    Args:
        session: knows its next logits; stays as it is.
        num_beams: beams, and hypotheses returned, at most; all run in one step, so
            `max_num_seqs` must allow them.
        max_tokens: the longest continuation.
        length_penalty: scores are divided by length ** length_penalty.
        early_stopping: stop when there are `num_beams` hypotheses, whatever could still come.
        stop_ids: tokens that end a continuation; None: the model's.
    """
    group = BeamGroup(
        session,
        num_beams,
        stop_ids=stop_ids,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    for length in range(1, max_tokens + 1):
        group.choose(last=length == max_tokens)
        advance([group])
        if not group.running:
            break
    return group.done
