"""When guesses count as accepted, whatever becomes of their sequence."""

from typing import Any

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
