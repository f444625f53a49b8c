"""Guesses on the host: what they are made from, and when they count as accepted."""

from typing import Any

import numpy as np
import pytest

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request, SpeculationStats
from hybrid_jax.errors import NonFiniteLogits, NothingToSample
from tests.helpers.engine_checks import (
    assert_baseline,
    drive,
    expected_tokens,
    greedy,
    prompt_of,
    small_config,
)
from tests.helpers.fake_runner import FULL, STATE, FakeRunner, window
from tests.helpers.guesses import Scripted

SPECS = (FULL, window(6), STATE)
K = 3
PROMPT = prompt_of(5, 2)


@pytest.mark.parametrize("event", ["nan", "unusable", "stop", "length"])
@pytest.mark.parametrize("taken", [1, 2, 3, 4])
def test_accepted_is_what_was_right_and_became_output(event: str, taken: int) -> None:
    """All guesses are right; the first step that verifies brings `taken` tokens and no more."""
    config = small_config(num_speculative_tokens=K, prefix_cache=False)
    runner = FakeRunner(SPECS, (40, 30, 20), config)
    engine = Engine(runner, None)
    tokens = expected_tokens(Request("", PROMPT, greedy(20)), SPECS)
    assert len(set(tokens[: K + 2])) == K + 2  # so that stop tokens come where they shall
    engine._speculation.drafter = Scripted([(*PROMPT, *tokens)], 1.0)
    options: dict[str, Any] = {"max_tokens": 12}
    place = (1, len(PROMPT) + 1 + taken)  # the sequence's uid, and what has been seen by then
    if event == "nan":
        runner.poisoned_uids.add(place)
    elif event == "unusable":
        runner.unusable_uids.add(place)
    elif event == "stop":
        options["stop_token_ids"] = [tokens[taken]]
    else:
        options["max_tokens"] = 1 + taken
    engine.add_request(Request("a", PROMPT, greedy(**options)))
    record = drive(engine)

    errors = {"nan": NonFiniteLogits, "unusable": NothingToSample}
    end = record.finals["a"]
    assert isinstance(end.error, errors.get(event, type(None)))
    assert record.tokens[("a", 0)] == tokens[: 1 + taken]
    fails_later = event in errors and taken == K + 1  # in a second step, which brings nothing
    accepted, steps = min(taken, K), 1 + fails_later
    assert engine.stats().speculation == SpeculationStats(steps, K * steps, accepted)
    assert end.usage is not None
    assert (end.usage.draft_tokens, end.usage.accepted_tokens) == (K * steps, accepted)
    assert_baseline(engine, runner)


def test_guesses_are_made_from_an_array_that_is_kept() -> None:
    """Of all tokens known, also after preemptions; and a look-up does not copy it."""
    config = small_config(num_speculative_tokens=K)
    runner = FakeRunner((FULL,), (14,), config)
    engine = Engine(runner, None)
    requests = [Request(f"r{i}", prompt_of(3, i), greedy(30)) for i in range(3)]
    texts = [[*r.prompt_token_ids, *expected_tokens(r, (FULL,))] for r in requests]
    seen: list[int] = []

    def drafter(token_ids: np.ndarray, count: int) -> list[int]:
        assert np.asarray(token_ids, np.int32) is token_ids
        known = token_ids.tolist()
        assert known in [text[: len(known)] for text in texts]
        newest = {len(s.token_ids) for s in engine._scheduler.running.values()}
        assert len(known) in newest
        seen.append(len(known))
        return [96] * count

    engine._speculation.drafter = drafter
    for request in requests:
        engine.add_request(request)
    record = drive(engine)
    assert [record.tokens[(r.request_id, 0)] for r in requests] == [t[3:] for t in texts]
    assert engine.stats().preemptions > 0 and max(seen) == 32
    assert_baseline(engine, runner)
