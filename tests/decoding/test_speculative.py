"""Speculation gives the tokens of plain decoding, one for one, and leaves the states of those."""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from hybrid_jax import SamplingParams
from hybrid_jax.decoding import DraftModel, PromptLookup, Session, Workspace, generate, speculate
from hybrid_jax.decoding.memory import MemoryPools
from hybrid_jax.drafts import Drafter
from hybrid_jax.errors import InvalidRequest
from hybrid_jax.generate import dense_logits
from hybrid_jax.loading import LoadedModel, load_model
from tests.decoding.conftest import OPTIONS, GetWorkspace
from tests.helpers import tiny
from tests.helpers.real_engine import Oracle, random_prompt

SEED = int(os.environ.get("HYBRID_JAX_TEST_SEED") or int.from_bytes(os.urandom(3)))
K = 2  # drafts of most tests: one compiled step for all
NEW = 14

Models = Callable[[str], LoadedModel]
Oracles = Callable[[str], Oracle]


class Scripted:
    """Guesses what will come, but each guess is wrong with some probability; or makes none."""

    def __init__(self, text: Sequence[int], right: float, none: float = 0.0) -> None:
        self.text, self.right, self.none = list(text), right, none
        self.rng = random.Random(SEED)

    def __call__(self, token_ids: Sequence[int], count: int) -> list[int]:
        if self.rng.random() < self.none:
            return []
        guesses = self.text[len(token_ids) : len(token_ids) + count]
        return [t if self.rng.random() < self.right else (t + 1) % 128 for t in guesses]


def started(space: Workspace, prompt: Sequence[int]) -> Session:
    session = space.session()
    session.prefill(prompt)
    return session


def greedy(count: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, **fields)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 17])
def test_greedy_tokens_after_short_prompts(
    length: int, workspace: GetWorkspace, oracles: Oracles
) -> None:
    """Shorter and longer than the convolution; guesses all right, all wrong, mixed, missing."""
    space, prompt = workspace("lara_mini"), random_prompt(length, SEED)
    wanted = oracles("lara_mini")(prompt, NEW)
    text = [*prompt, *wanted]
    drafters: list[Drafter] = [
        Scripted(text, 1.0),
        Scripted(text, 0.0),
        Scripted(text, 0.6, none=0.3),
        PromptLookup(),
        lambda token_ids, count: [],
    ]
    for drafter in drafters:
        session = started(space, prompt)
        tokens, acceptance = speculate(session, drafter, greedy(NEW), num_drafts=K)
        assert tokens == wanted, f"HYBRID_JAX_TEST_SEED={SEED}"
        assert session.token_ids == text[:-1]  # the last one is not fed
        if drafter is drafters[0]:
            assert acceptance.accepted == [K] * (acceptance.steps - 1) + acceptance.accepted[-1:]
            assert acceptance.tokens_per_step > K
        if drafter is drafters[1]:
            assert acceptance.rate == 0.0 and acceptance.tokens_per_step == 1.0
            assert acceptance.steps == NEW - 1 and acceptance.by_position() == [0.0] * K


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "olmo_hybrid"])
def test_other_models(name: str, workspace: GetWorkspace, oracles: Oracles) -> None:
    """Windows without states: pages that only wrong guesses reached are given back."""
    prompt = random_prompt(19, SEED)
    wanted = oracles(name)(prompt, NEW)
    session = started(workspace(name), prompt)
    drafter = Scripted([*prompt, *wanted], 0.5, none=0.2)
    assert speculate(session, drafter, greedy(NEW), num_drafts=K)[0] == wanted


def test_the_states_are_those_of_the_kept_tokens(workspace: GetWorkspace, oracles: Oracles) -> None:
    """Recurrent and convolution state after rolling back, against a session that never guessed."""
    space, prompt = workspace("lara_mini"), random_prompt(9, SEED)
    wanted = oracles("lara_mini")(prompt, NEW)
    session = started(space, prompt)
    speculate(session, Scripted([*prompt, *wanted], 0.5), greedy(NEW), num_drafts=K)
    plain = started(space, prompt)
    for token in wanted[:-1]:
        plain.decode(token)
    for layer in (0, 2):
        for name, array in plain.state(layer).items():
            # Both are decode steps of the same tokens; XLA may round a matrix product of several
            # rows differently.
            np.testing.assert_allclose(
                session.state(layer)[name], array, rtol=1e-4, atol=1e-5 * np.abs(array).max()
            )


def test_k_plus_one_rows_and_no_copies(
    workspace: GetWorkspace, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often guesses are wrong."""
    space, prompt = workspace("lara_mini"), random_prompt(8, SEED)
    wanted = oracles("lara_mini")(prompt, NEW)
    session = started(space, prompt)
    copied: list[int] = []
    for name in ("copy", "write", "read", "fill"):
        monkeypatch.setattr(space.runner, name, lambda group, *args: copied.extend(*args[:1]))
    states = [space.memory.pools[group] for group in space.memory.states]
    reserve, used = MemoryPools.reserve, []

    def watched(self: MemoryPools, *args: Any, **options: Any) -> Any:
        result = reserve(self, *args, **options)
        used.append([pool.num_used for pool in states])
        return result

    monkeypatch.setattr(MemoryPools, "reserve", watched)
    drafter = Scripted([*prompt, *wanted], 0.5)
    assert speculate(session, drafter, greedy(NEW), num_drafts=K)[0] == wanted
    assert used == [[K + 1]] * len(used) and not copied


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.3},
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
        {"temperature": 1.0, "top_k": 8, "frequency_penalty": 1.0, "logit_bias": {5: 3.0}},
    ],
)
def test_sampled_tokens_are_those_of_plain_sampling(
    fields: dict[str, Any], workspace: GetWorkspace
) -> None:
    """With the same seed, token for token: penalties see the guesses that were right only."""
    space, prompt = workspace("lara_mini"), random_prompt(11, SEED)
    params = SamplingParams(max_tokens=NEW, seed=SEED, **fields)
    wanted = generate(started(space, prompt), params)
    for right in (1.0, 0.5):
        drafter = Scripted([*prompt, *wanted], right)
        assert speculate(started(space, prompt), drafter, params, num_drafts=K)[0] == wanted


def test_the_distribution_of_sampled_tokens(workspace: GetWorkspace, models: Models) -> None:
    """Pairs of tokens against their exact probabilities, which come from the oracle's logits.

    The guess is always the likeliest first token and then one that is often wrong. A chi-squared
    test; right code fails it once in a million runs.
    """
    model, runs, top = models("lara_mini"), 400, 3
    prompt = list(random_prompt(6, SEED))

    def choices(token_ids: list[int]) -> dict[int, float]:
        logits = np.asarray(dense_logits(model, token_ids))[-1].astype(np.float64)
        best = np.argsort(-logits)[:top]
        weights = np.exp((logits[best] - logits.max()) / 2.0)
        return dict(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))

    first = choices(prompt)
    exact = {
        (a, b, c): p * q * r
        for a, p in first.items()
        for b, q in choices([*prompt, a]).items()
        for c, r in choices([*prompt, a, b]).items()
    }
    guesses = {a: max(choices([*prompt, a]), key=choices([*prompt, a]).get) for a in first}
    trunk = started(workspace("lara_mini"), prompt)
    counts = dict.fromkeys(exact, 0)
    accepted = 0
    params = SamplingParams(temperature=2.0, top_k=top, max_tokens=3)
    for i in range(runs):
        (session,) = trunk.fork(1)
        drafter = lambda ids, count: [guesses.get(ids[-1], 0), 7]  # noqa: E731
        seeded = replace(params, seed=SEED + i)
        tokens, acceptance = speculate(session, drafter, seeded, num_drafts=K)
        counts[tuple(tokens)] += 1
        accepted += sum(acceptance.accepted)
        session.close()
    assert runs / 10 < accepted < 2 * runs  # both ways were taken
    likely = [key for key, p in exact.items() if p * runs >= 5]  # as the test's theory asks
    observed = [counts[key] for key in likely]
    wanted = [exact[key] * runs for key in likely]
    if (rest := runs - sum(wanted)) > 1e-6:
        observed.append(runs - sum(observed))
        wanted.append(rest)
    scale = runs / sum(wanted)
    p_value = chisquare(observed, np.array(wanted) * scale).pvalue
    assert p_value > 1e-6, f"HYBRID_JAX_TEST_SEED={SEED}: {observed} {wanted}"


def test_stop_tokens_among_right_guesses(workspace: GetWorkspace, oracles: Oracles) -> None:
    """The text ends there, and the session goes on from there."""
    space, prompt = workspace("lara_mini"), random_prompt(7, SEED)
    wanted = oracles("lara_mini")(prompt, NEW)
    for end in range(1, 8):
        stop = wanted[end]
        if stop in wanted[:end]:
            continue
        session = started(space, prompt)
        params = greedy(NEW, stop_token_ids=(stop,))
        tokens, _ = speculate(session, Scripted([*prompt, *wanted], 1.0), params, num_drafts=K)
        assert tokens == wanted[: end + 1] == generate(started(space, prompt), params)
        assert session.token_ids == [*prompt, *wanted[:end]]
        session.decode(stop)
        assert generate(session, greedy(3)) == wanted[end + 1 : end + 4]


@pytest.mark.parametrize("same", [True, False])
def test_a_draft_model(
    same: bool, workspace: GetWorkspace, oracles: Oracles, tmp_path_factory: Any
) -> None:
    """The model itself, whose guesses are all right, and another hybrid, with other weights."""
    space, prompt = workspace("lara_mini"), random_prompt(10, SEED)
    wanted = oracles("lara_mini")(prompt, NEW)
    other = space
    if not same:
        directory = tiny.write_checkpoint("lara_mini", tmp_path_factory.mktemp("draft"), 1)
        other = Workspace(load_model(directory, dtype="float32"), **OPTIONS)
    draft = DraftModel(other.session())
    session = started(space, prompt)
    tokens, acceptance = speculate(session, draft, greedy(NEW), num_drafts=K)
    assert tokens == wanted
    if same:
        assert acceptance.rate > 0.9  # the last step's guesses may go beyond the end
    params = SamplingParams(max_tokens=NEW, seed=SEED)
    plain = generate(started(space, prompt), params)
    draft = DraftModel(other.session(), params)
    tokens, acceptance = speculate(started(space, prompt), draft, params, num_drafts=K)
    assert tokens == plain
    if same:
        assert acceptance.rate > 0.9  # with the same seed, samples agree as well


def test_zero_guesses_run_the_same_step(workspace: GetWorkspace) -> None:
    space, prompt = workspace("lara_mini"), random_prompt(5, SEED)
    text = [*prompt, *speculate(started(space, prompt), PromptLookup(), greedy(6), num_drafts=K)[0]]
    compiles = space.num_compiles
    speculate(started(space, prompt), lambda ids, count: [], greedy(6), num_drafts=K)
    speculate(started(space, prompt), Scripted(text, 1.0), greedy(6), num_drafts=K)
    assert space.num_compiles == compiles


def test_prompt_lookup() -> None:
    """The longest match counts, and of equal ones the last."""
    look = PromptLookup(longest=2)
    assert look([1, 2, 3, 9, 2, 4, 1, 2], 3) == [3, 9, 2]
    assert look([7, 2, 5, 8, 2, 6, 2], 2) == [6, 2]
    assert look([1, 1], 3) == [1]
    assert look([1, 2, 3], 3) == [] == look([1], 3)
    for length, seed in product(range(1, 30), range(5)):
        rng = random.Random(f"{SEED} {length} {seed}")
        text = [rng.randrange(3) for _ in range(length)]
        found = PromptLookup()(text, 4)
        whole = " ".join(map(str, text))
        if found:  # some suffix, followed by the guess, is in the text
            assert f"{text[-1]} {' '.join(map(str, found))}" in whole
        else:
            assert text[-1] not in text[:-1]


def test_limits(workspace: GetWorkspace) -> None:
    session = started(workspace("lara_mini"), random_prompt(50, 0))
    with pytest.raises(InvalidRequest, match="50 tokens, 14 new ones and 2 drafts are more than"):
        speculate(session, PromptLookup(), greedy(14), num_drafts=2)
    assert len(speculate(session, PromptLookup(), greedy(13), num_drafts=2)[0]) == 13
    with pytest.raises(InvalidRequest, match="num_drafts must be at least 1, got 0"):
        speculate(session, PromptLookup(), num_drafts=0)
    with pytest.raises(InvalidRequest, match="the drafter is 'lookup', which nobody can call"):
        speculate(session, "lookup", num_drafts=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="stop .* has no meaning for a session"):
        speculate(session, PromptLookup(), greedy(1, stop="."), num_drafts=1)
