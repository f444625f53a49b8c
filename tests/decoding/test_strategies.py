"""Strategies against definitions written out with the oracle's logits, which has no cache."""

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.decoding import (
    Contrastive,
    Guided,
    Session,
    Workspace,
    beam_search,
    best_of_n,
    diverse_beam_search,
    generate,
    sample_many,
    self_consistency,
)
from hybrid_jax.errors import InvalidRequest, NonFiniteLogits, NothingToSample
from hybrid_jax.generate import dense_logits
from hybrid_jax.loading import LoadedModel
from tests.decoding.conftest import GetWorkspace
from tests.helpers.real_engine import Oracle, random_prompt

SEED = int(os.environ.get("HYBRID_JAX_TEST_SEED") or int.from_bytes(os.urandom(3)))
PROMPT = list(random_prompt(9, SEED))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
RANDOM = SamplingParams(temperature=1.0, max_tokens=6, seed=SEED)
# Sums of some ten log probabilities, each from float32 logits that sum in another order.
TOLERANCE = 1e-3

Models = Callable[[str], LoadedModel]


def started(space: Workspace) -> Session:
    session = space.session()
    session.prefill(PROMPT)
    return session


def logprobs(model: LoadedModel, token_ids: list[int]) -> np.ndarray:
    """f64[V] of the next token, from the definition."""
    logits = np.asarray(dense_logits(model, token_ids))[-1].astype(np.float64)
    return logits - np.logaddexp.reduce(logits)


def test_greedy_is_the_oracles(workspace: GetWorkspace, oracles: Callable[[str], Oracle]) -> None:
    session = started(workspace("lara_mini"))
    wanted = oracles("lara_mini")(tuple(PROMPT), 8)
    assert generate(session, GREEDY) == wanted, f"HYBRID_JAX_TEST_SEED={SEED}"
    assert session.token_ids == PROMPT + wanted[:-1]
    stop = next(t for t in wanted if wanted.index(t) > 2)
    stopped = generate(started(workspace("lara_mini")), replace(GREEDY, stop_token_ids=(stop,)))
    assert stopped == wanted[: wanted.index(stop) + 1]


def test_many_samples_are_those_of_one_at_a_time(workspace: GetWorkspace, models: Models) -> None:
    session = started(workspace("lara_mini"))
    many = sample_many(session, 4, RANDOM)
    for i, completion in enumerate(many):
        alone = generate(session.fork(1)[0], replace(RANDOM, seed=SEED + i))
        assert completion.token_ids == alone
        for position, (token, logprob) in enumerate(zip(alone, completion.logprobs, strict=True)):
            before = PROMPT + alone[:position]
            assert abs(logprobs(models("lara_mini"), before)[token] - logprob) < TOLERANCE
    assert len({tuple(c.token_ids) for c in many}) > 1
    best = best_of_n(session, 4, RANDOM)
    means = [np.mean(c.logprobs) for c in best]
    assert means == sorted(means, reverse=True)
    assert sorted(c.token_ids for c in best) == sorted(c.token_ids for c in many)
    longest = best_of_n(session, 4, RANDOM, score=lambda c: c.token_ids[0])
    assert longest[0].token_ids[0] == max(c.token_ids[0] for c in many)


def test_a_vote(workspace: GetWorkspace) -> None:
    """On whether the first token is even, if the second one is below 100."""
    session = started(workspace("lara_mini"))

    def answer(tokens: list[int]) -> int | None:
        return tokens[0] % 2 if tokens[1] < 100 else None

    vote = self_consistency(session, 5, RANDOM, answer)
    answers = [a for c in vote.completions if (a := answer(c.token_ids)) is not None]
    assert vote.share == max(answers.count(0), answers.count(1)) / len(answers)
    assert answers.count(vote.answer) == max(answers.count(0), answers.count(1))
    with pytest.raises(InvalidRequest, match="none of 2 samples has an answer"):
        self_consistency(session, 2, RANDOM, lambda tokens: None)


def naive_beams(
    model: LoadedModel, width: int, length: int, taken: list[list[int]], diversity: float
) -> list[tuple[float, list[int]]]:
    """Beam search by the book, without a cache; `taken[t]` are the tokens of earlier groups."""
    beams = [(0.0, list[int]())]
    for t in range(length):
        every = []
        for score, tokens in beams:
            for token, logprob in enumerate(logprobs(model, PROMPT + tokens)):
                objective = score + logprob - diversity * taken[t].count(token)
                every.append((objective, score + logprob, [*tokens, token]))
        every.sort(key=lambda c: -c[0])
        beams = [(score, tokens) for _, score, tokens in every[:width]]
        taken[t] += [tokens[-1] for _, tokens in beams]
    return beams


@pytest.mark.parametrize("diversity", [0.0, 1.5])
def test_diverse_beams_by_the_book(
    diversity: float, workspace: GetWorkspace, models: Models
) -> None:
    length, taken = 4, [[] for _ in range(4)]
    session = started(workspace("lara_mini"))
    groups = diverse_beam_search(
        session, num_beams=4, num_groups=2, diversity=diversity, max_tokens=length
    )
    for hypotheses in groups:
        wanted = naive_beams(models("lara_mini"), 2, length, taken, diversity)
        wanted.sort(key=lambda beam: -beam[0])
        assert [h.token_ids for h in hypotheses] == [tokens for _, tokens in wanted]
        for hypothesis, (score, _) in zip(hypotheses, wanted, strict=True):
            assert abs(hypothesis.score - score / length) < TOLERANCE
    first, second = ([h.token_ids for h in hypotheses] for hypotheses in groups)
    assert (first == second) == (diversity == 0.0)
    with pytest.raises(InvalidRequest, match="4 beams cannot be shared out to 3 groups"):
        diverse_beam_search(session, num_beams=4, num_groups=3)
    with pytest.raises(InvalidRequest, match="at least one beam, got 0"):
        beam_search(session, num_beams=0)


def test_contrastive_decoding(workspace: GetWorkspace, models: Models) -> None:
    """An amateur of another family. Each token by the paper's formula."""
    expert, amateur = started(workspace("lara_mini")), started(workspace("gemma3"))
    tokens = generate(Contrastive(expert, amateur, alpha=0.2), GREEDY)
    for position, token in enumerate(tokens):
        before = PROMPT + tokens[:position]
        strong = logprobs(models("lara_mini"), before)
        weak = logprobs(models("gemma3"), before)
        plausible = np.exp(strong) >= 0.2 * np.exp(strong).max()
        contrast = np.where(plausible, strong - weak, -np.inf)
        assert contrast[token] > contrast.max() - TOLERANCE
    assert expert.token_ids == amateur.token_ids == PROMPT + tokens[:-1]
    with pytest.raises(ValueError, match="alpha must be"):
        Contrastive(expert, amateur, alpha=0.0)


def test_guidance(workspace: GetWorkspace, models: Models) -> None:
    space = workspace("lara_mini")
    session, other = started(space), space.session()
    other.prefill(PROMPT[-2:])
    tokens = generate(Guided(session, other, scale=2.5), GREEDY)
    for position, token in enumerate(tokens):
        new = tokens[:position]
        with_ = logprobs(models("lara_mini"), PROMPT + new)
        without = logprobs(models("lara_mini"), PROMPT[-2:] + new)
        guided = without + 2.5 * (with_ - without)
        assert guided[token] > guided.max() - TOLERANCE
    alone = generate(started(space), GREEDY)
    other = space.session()
    other.prefill([1])
    assert generate(Guided(started(space), other, scale=1.0), GREEDY) == alone


def test_what_a_sampler_refuses(workspace: GetWorkspace) -> None:
    session = started(workspace("lara_mini"))
    for fields in ({"n": 2}, {"stop": "."}, {"logprobs": 1}):
        with pytest.raises(InvalidRequest, match=f"{next(iter(fields))} .* has no meaning"):
            generate(session, SamplingParams(**fields))
    nothing = {"none": lambda logits, context: logits - np.float32(np.inf)}
    params = SamplingParams(temperature=0.0, logits_processors=("none",))
    with pytest.raises(NothingToSample):
        generate(session, params, processors=nothing)
    state = session.state(0)
    session.set_state(0, recurrent=np.full_like(state["recurrent"], np.nan))
    session.decode(1)
    with pytest.raises(NonFiniteLogits):
        generate(session)
