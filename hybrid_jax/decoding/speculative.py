"""Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192), exact for models with state.

Something cheap guesses the next K tokens; one step feeds them all and gives the logits after each.
What the model would have chosen itself is drawn from these logits, with the seed and the position
as always; the guesses that agree are kept, and the first token that disagrees replaces its guess.
So the tokens are those of `generate`, one for one, greedy or sampled, whatever the guesses are. (A
draft model that samples with the same seed agrees often, since both draw with the same noise:
Daliri et al. 2024, arXiv:2408.07978.)

Wrong guesses have gone through the states of linear layers, where nothing can be subtracted. But a
verifying step writes the state and the convolution's inputs after every token to a row of its own,
K + 1 rows in all, and taking guesses back is `Session.rewind`: a choice of the row to read next.
Every step has the same layout: missing guesses are filled up, with tokens that may even be right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybrid_jax.decoding.sampling import GREEDY, Sampler, require, sampler_for
from hybrid_jax.decoding.session import Session
from hybrid_jax.drafts import Drafter
from hybrid_jax.errors import CannotRewind, InvalidRequest
from hybrid_jax.fields import shown
from hybrid_jax.runtime.sampling import LogitsProcessor
from hybrid_jax.sampling_params import SamplingParams


@dataclass
class DraftModel:
    """Guesses by a smaller model with the same vocabulary, in a session that it alone uses.

    The session may be empty; it follows the text by itself. Its workspace needs `num_checkpoints`
    of at least K + 1: after every guess the draft's own states are kept, too.
    """

    session: Session
    params: SamplingParams = GREEDY  # those of the text agree most often

    def __call__(self, token_ids: Sequence[int], count: int) -> list[int]:
        """See `Drafter`."""
        sampler = Sampler(self.params)
        logits = self._follow(token_ids)
        guesses: list[int] = []
        while True:
            (guess,) = sampler(logits[None], self.session.token_ids)
            guesses.append(require(guess))
            if len(guesses) == count:
                return guesses
            self.session.checkpoint()
            logits = self.session.decode(guess)

    def _follow(self, token_ids: Sequence[int]):
        """Takes back what turned out otherwise and feeds what is new."""
        session, known = self.session, self.session.token_ids
        pairs = zip(known, token_ids, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(known))
        common = min(common, len(token_ids) - 1)  # the last token's logits are wanted
        try:
            session.rewind(len(known) - common)
        except CannotRewind:
            session.rewind(len(known))
        session.forget_checkpoints()
        return session.prefill(token_ids[len(session) :])


@dataclass
class Acceptance:
    """How well the guesses went."""

    num_drafts: int  # K
    accepted: list[int] = field(default_factory=list)  # right guesses of each step
    drafted: int = 0  # guesses made, fillings not counted

    @property
    def steps(self) -> int:
        """Verifying steps."""
        return len(self.accepted)

    @property
    def rate(self) -> float:
        """Right guesses per place for a guess."""
        return sum(self.accepted) / max(1, self.steps * self.num_drafts)

    @property
    def tokens_per_step(self) -> float:
        """What a step brings, on average; 1 without speculation."""
        return 1 + sum(self.accepted) / max(1, self.steps)

    def by_position(self) -> list[float]:
        """The share of steps in which at least 1, 2, ... K guesses were right."""
        counts = [sum(n > i for n in self.accepted) for i in range(self.num_drafts)]
        return [count / max(1, self.steps) for count in counts]


def speculate(
    session: Session,
    drafter: Drafter,
    params: SamplingParams = GREEDY,
    *,
    num_drafts: int = 4,
    processors: Mapping[str, LogitsProcessor] | None = None,
) -> tuple[list[int], Acceptance]:
    """The tokens that `sampling.generate` gives, in fewer steps. The last one is not fed.

    Args:
        session: knows its next logits.
        drafter: makes the guesses.
        params: as for `generate`.
        num_drafts: K >= 1, guesses per step. A session holds K + 1 state slots meanwhile.
        processors: as for `generate`.

    Raises:
        InvalidRequest: the drafter is none, K is no positive number, or the guesses after the
            last token would not fit `max_model_len`.
        NothingToSample: the parameters exclude every token.
    """
    _check(session, drafter, params, num_drafts)
    sampler, statistics = sampler_for(session, params, processors), Acceptance(num_drafts)
    (token,) = sampler(session.next_logits[None], session.token_ids)
    new = [require(token)]
    while new[-1] not in sampler.stop_ids and len(new) < params.max_tokens:
        start = len(session)
        guesses = drafter([*session.token_ids, new[-1]], num_drafts)[:num_drafts]
        fed = [new[-1], *guesses, *[new[-1]] * (num_drafts - len(guesses))]
        tokens = sampler(session.verify(fed), session.token_ids)
        right = next((i for i in range(num_drafts) if tokens[i] != fed[i + 1]), num_drafts)
        statistics.accepted.append(right)
        statistics.drafted += len(guesses)
        for token in tokens[: right + 1]:
            new.append(require(token))
            start += 1
            if token in sampler.stop_ids or len(new) == params.max_tokens:
                break
        session.rewind(len(session) - start)
    return new, statistics


def _check(session: Session, drafter: object, params: SamplingParams, num_drafts: int) -> None:
    if not callable(drafter):
        raise InvalidRequest(
            f"the drafter is {shown(drafter)}, which nobody can call; give a PromptLookup() or a "
            "DraftModel"
        )
    if num_drafts < 1:
        raise InvalidRequest(f"num_drafts must be at least 1, got {num_drafts}; or use generate")
    most = session.workspace.config.max_model_len
    need = len(session) + params.max_tokens - 1 + num_drafts
    if need > most:
        raise InvalidRequest(
            f"{len(session)} tokens, {params.max_tokens} new ones and {num_drafts} drafts are more "
            f"than max_model_len {most}; raise it or ask for fewer tokens"
        )
