"""What is refused, with which words, and that nothing was allocated for it."""

from typing import Any

import pytest

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.errors import EngineDead, InvalidRequest, ModelError, QueueFull
from hybrid_jax.sampling_params import SamplingParams
from tests.helpers.engine_checks import (
    assert_baseline,
    drive,
    expected_tokens,
    greedy,
    prompt_of,
    small_config,
)
from tests.helpers.fake_runner import FULL, STATE, FakeRunner, window

SPECS = (FULL, window(6), STATE)


def make(counts: tuple[int, ...] = (30, 20, 4), **options: object) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(SPECS, counts, small_config(**options))
    return Engine(runner, None), runner


REFUSED = {
    "empty": ((), greedy(4), "prompt is empty"),
    "negative id": ((3, -1), greedy(4), r"token id -1 is outside the vocabulary \[0, 97\)"),
    "large id": ((3, 97), greedy(4), "token id 97 is outside"),
    "too long": (prompt_of(64), greedy(4), "64 tokens but max_model_len is 64, which leaves 63"),
    "logprobs": ((3,), greedy(4, logprobs=21), "logprobs is 21 but max_logprobs is 20"),
    "prompt": ((3,), greedy(4, prompt_logprobs=21), "prompt_logprobs is 21 but max_logprobs is 20"),
    "bias": (
        (3,),
        greedy(4, logit_bias=dict.fromkeys(range(6), 1.0)),
        "logit_bias has 6 entries but max_logit_bias is 5",
    ),
    "bias id": ((3,), greedy(4, logit_bias={97: 1.0}), "logit_bias names token 97"),
    "stop id": ((3,), greedy(4, stop_token_ids=(500,)), "stop_token_ids names token 500"),
    "processor": ((3,), greedy(4, logits_processors=("nope",)), "'nope' is not registered.*known"),
    "stop string": ((3,), greedy(4, stop="x"), "need text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_refused_in_one_sentence(name: str) -> None:
    prompt, params, words = REFUSED[name]
    engine, runner = make(max_logit_bias=5)
    for check in (engine.validate, engine.add_request):
        with pytest.raises(InvalidRequest, match=words) as raised:
            check(Request("bad", prompt, params))
        assert isinstance(raised.value, ValueError)
        assert "\n" not in str(raised.value)
    assert not engine.has_work() and not engine.abort("bad")
    assert_baseline(engine, runner)


def test_the_longest_prompt_gets_one_token_and_max_tokens_is_clamped() -> None:
    engine, runner = make()
    for length in (63, 60):
        request = Request(f"n{length}", prompt_of(length), greedy(500))
        engine.add_request(request)
        record = drive(engine)
        key = (request.request_id, 0)
        assert record.tokens[key] == expected_tokens(request, SPECS)
        assert len(record.tokens[key]) == 64 - length
        assert record.ends[key].finish_reason == "length"
    assert_baseline(engine, runner)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((6, 20, 4), "20 prompt tokens and 2 new ones need 6 pages of 4 tokens in cache group 0"),
        ((30, 6, 4), r"need 6 pages of 4 tokens in cache group 1 \(window\), which has 5"),
    ],
)
def test_a_request_larger_than_a_pool_is_refused_and_blocks_nobody(
    counts: tuple[int, ...], words: str
) -> None:
    engine, runner = make(counts)
    good = Request("good", prompt_of(19), greedy(2))
    engine.add_request(good)
    with pytest.raises(InvalidRequest, match=words):
        engine.add_request(Request("large", prompt_of(20), greedy(2)))
    fits = Request("fits", prompt_of(20), greedy(1))
    engine.add_request(fits)
    record = drive(engine)
    for request in (good, fits):
        assert record.tokens[(request.request_id, 0)] == expected_tokens(request, SPECS)
    assert_baseline(engine, runner)


def test_a_full_queue_refuses_and_recovers() -> None:
    engine, runner = make(max_queue=2)
    for i in range(2):
        engine.add_request(Request(f"r{i}", prompt_of(3, i), greedy(2)))
    with pytest.raises(QueueFull, match="2 sequences wait and max_queue is 2"):
        engine.add_request(Request("late", prompt_of(3), greedy(2)))
    assert engine.stats().waiting == 2
    engine.step()
    engine.add_request(Request("late", prompt_of(3), greedy(2)))
    assert set(drive(engine).finals) == {"r0", "r1", "late"}
    assert_baseline(engine, runner)


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine, runner = make()
    request = Request("a", prompt_of(3), greedy(2))
    engine.add_request(request)
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        engine.add_request(request)
    drive(engine)
    engine.add_request(request)
    assert drive(engine).tokens[("a", 0)] == expected_tokens(request, SPECS)
    assert_baseline(engine, runner)


@pytest.mark.parametrize("counts", [(1, 20, 4), (30, 20, 1)])
def test_a_group_with_nothing_but_its_null_id_is_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="nothing but its null id"):
        make(counts)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("run_ahead", [True, False])
def test_abort_ends_a_request_at_any_point_and_once(steps: int, run_ahead: bool) -> None:
    engine, runner = make(run_ahead=run_ahead)
    long = Request("long", prompt_of(30), greedy(20))
    other = Request("other", prompt_of(9, 1), greedy(20))
    engine.add_request(long)
    engine.add_request(other)
    record = drive(engine, before_step=lambda step: engine.abort("long") if step == steps else None)
    assert record.finals["long"].finish_reason == "abort"
    expected = expected_tokens(long, SPECS)
    tokens = record.tokens[("long", 0)]
    assert tokens == expected[: len(tokens)] and len(tokens) < 20
    assert record.tokens[("other", 0)] == expected_tokens(other, SPECS)
    assert not engine.abort("long") and not engine.abort("never heard of")
    assert_baseline(engine, runner)


def test_a_late_abort_does_not_hit_the_next_request_of_the_same_name() -> None:
    engine, runner = make(run_ahead=False)
    first = Request("a", prompt_of(3), greedy(1))
    engine.add_request(first)
    step = runner.step

    def abort_during_step(*args: Any) -> Any:
        engine.abort("a")  # as another thread may
        return step(*args)

    runner.step = abort_during_step  # type: ignore[method-assign]
    assert engine.step()[-1].finish_reason == "length"
    runner.step = step  # type: ignore[method-assign]
    second = Request("a", prompt_of(5), greedy(4))
    engine.add_request(second)
    assert drive(engine).tokens[("a", 0)] == expected_tokens(second, SPECS)
    assert_baseline(engine, runner)


def test_abort_ends_all_completions_of_a_request() -> None:
    engine, runner = make()
    engine.add_request(Request("a", prompt_of(3), greedy(20, n=5)))
    record = drive(engine, before_step=lambda step: engine.abort("a") if step == 4 else None)
    assert set(record.ends) == {("a", i) for i in range(5)}
    assert {end.finish_reason for end in record.ends.values()} == {"abort"}
    assert_baseline(engine, runner)


def test_n_completions_use_consecutive_seeds() -> None:
    engine, runner = make(max_num_seqs=2)
    params = SamplingParams(n=3, seed=2**32 - 2, max_tokens=6, ignore_eos=True)
    request = Request("a", prompt_of(5), params)
    engine.add_request(request)
    record = drive(engine)
    for index, seed in enumerate((2**32 - 2, 2**32 - 1, 0)):
        assert record.tokens[("a", index)] == expected_tokens(request, SPECS, seed=seed)
    usage = record.finals["a"].usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (5, 18)
    assert_baseline(engine, runner)


def test_requests_without_a_seed_differ_and_repeat_with_the_engine_seed() -> None:
    def outputs(seed: int) -> list[list[int]]:
        engine, _ = make(seed=seed)
        for i in range(3):
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            engine.add_request(Request(f"r{i}", prompt_of(5), params))
        record = drive(engine)
        return [record.tokens[(f"r{i}", 0)] for i in range(3)]

    first = outputs(0)
    assert first == outputs(0)
    assert len({tuple(tokens) for tokens in [*first, *outputs(1)]}) == 6


def test_stop_tokens_end_a_completion_but_not_before_the_minimum() -> None:
    free = Request("free", prompt_of(5), greedy(12))
    tokens = expected_tokens(free, SPECS)
    stop = tokens[4]
    first = tokens.index(stop)
    engine, runner = make()
    engine.add_request(Request("stop", prompt_of(5), greedy(12, stop_token_ids=(stop,))))
    engine.add_request(
        Request("min", prompt_of(5), greedy(12, stop_token_ids=(stop,), min_tokens=first + 1))
    )
    record = drive(engine)
    end = record.ends[("stop", 0)]
    assert (end.finish_reason, end.stop_reason) == ("stop", stop)
    assert record.tokens[("stop", 0)] == tokens[: first + 1]
    assert len(record.tokens[("min", 0)]) > first + 1
    assert_baseline(engine, runner)


def test_log_probabilities_come_with_the_tokens_of_those_who_asked() -> None:
    engine, runner = make()
    for name, count in (("none", None), ("own", 0), ("three", 3)):
        engine.add_request(Request(name, prompt_of(5), greedy(3, logprobs=count)))
    events = []
    while engine.has_work():
        events += engine.step()
    by_request = {n: [e for e in events if e.request_id == n] for n in ("none", "own", "three")}
    assert all(e.logprobs is None for e in by_request["none"])
    for name, count in (("own", 0), ("three", 3)):
        for event in by_request[name]:
            assert event.logprobs is not None
            (entry,) = event.logprobs
            assert (entry.token_id,) == event.new_token_ids
            assert entry.logprob == -0.5 and len(entry.top) == count
    assert_baseline(engine, runner)


def test_a_closed_engine_has_ended_everything_and_accepts_nothing() -> None:
    engine, runner = make()
    for i in range(6):
        engine.add_request(Request(f"r{i}", prompt_of(9, i), greedy(9)))
    engine.step()
    engine.step()
    engine.close()
    engine.close()
    events = engine.step()
    assert sorted(e.request_id for e in events if e.final) == [f"r{i}" for i in range(6)]
    with pytest.raises(EngineDead, match="closed"):
        engine.add_request(Request("late", prompt_of(3), greedy(2)))
    assert not engine.has_work()
    assert_baseline(engine, runner)
