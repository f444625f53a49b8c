"""Several samples, of which one is taken: the likeliest, or the one that most agree with."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from hybrid_jax.decoding.sampling import Completion, sample_many
from hybrid_jax.decoding.session import Session
from hybrid_jax.errors import InvalidRequest
from hybrid_jax.sampling_params import SamplingParams


def mean_logprob(completion: Completion) -> float:
    """The mean log probability of a token."""
    return sum(completion.logprobs) / len(completion.logprobs)


def best_of_n(
    session: Session,
    count: int,
    params: SamplingParams,
    *,
    score: Callable[[Completion], float] = mean_logprob,
) -> list[Completion]:
    """So many samples, the one with the highest score first. `score` may be a reward model."""
    return sorted(sample_many(session, count, params), key=score, reverse=True)


@dataclass(frozen=True)
class Vote:
    """What most samples say."""

    answer: Hashable
    share: float  # of the samples that have an answer
    completions: list[Completion]  # all samples


def self_consistency(
    session: Session,
    count: int,
    params: SamplingParams,
    answer: Callable[[list[int]], Hashable | None],
) -> Vote:
    """Samples reasonings and takes the most frequent answer (Wang et al. 2022, arXiv:2203.11171).

    Args:
        session: knows its next logits; stays as it is.
        count: samples.
        params: of the samples; a temperature above 0.
        answer: reads the answer from a sample's tokens; None if there is none. Of answers that are
            equally frequent the one that came first is taken.

    Raises:
        InvalidRequest: no sample has an answer.
    """
    completions = sample_many(session, count, params)
    answers = [found for c in completions if (found := answer(c.token_ids)) is not None]
    if not answers:
        raise InvalidRequest(
            f"none of {count} samples has an answer; ask for more samples or more tokens"
        )
    ((winner, votes),) = Counter(answers).most_common(1)
    return Vote(winner, votes / len(answers), completions)
