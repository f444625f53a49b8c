"""Latency and throughput count what a runner without a model did, by a clock that is known."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from hybrid_jax.errors import InvalidRequest
from hybrid_jax.measure import RequestTimes, measure_latency, measure_throughput, percentiles
from hybrid_jax.measure.requests import latencies
from tests.helpers.engine_checks import small_config
from tests.helpers.fake_runner import FULL, STATE, FakeRunner, window

UNIT = 1 / 8  # seconds that pass whenever the clock is read; exact in binary


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner((FULL, window(8), STATE), (60, 60, 12), small_config())


def ticking() -> Callable[[], float]:
    return (UNIT * n for n in itertools.count()).__next__


def test_percentiles_are_values_that_occurred() -> None:
    rng = np.random.default_rng(3)
    for count in (1, 2, 9, 100, 257):
        values = rng.random(count)
        got = percentiles([*values, None])
        for p in (50, 90, 99):
            assert got[f"p{p}"] == np.percentile(values, p, method="inverted_cdf")
        assert got["mean"] == pytest.approx(values.mean(), rel=1e-12)
    assert set(percentiles([]).values()) == {None}


def test_latencies_of_known_requests() -> None:
    """Three tokens in 1 + 2 + 4 seconds, and one token alone."""
    some = [RequestTimes(1.0, [2.0, 4.0], 7.0, 5, 3), RequestTimes(2.0, [], 2.0, 5, 1)]
    got = latencies(some)
    assert got["ttft_seconds"] == {"p50": 1.0, "p90": 2.0, "p99": 2.0, "mean": 1.5}
    assert got["tpot_seconds"] == {"p50": 3.0, "p90": 3.0, "p99": 3.0, "mean": 3.0}
    assert got["itl_seconds"]["p50"] == 2.0 and got["itl_seconds"]["p90"] == 4.0
    assert got["e2e_seconds"]["mean"] == 4.5


def test_latency_by_a_known_clock(runner: FakeRunner) -> None:
    """The clock is read when a request is sent and when a step is done, and nowhere between.

    A step runs ahead of the one whose tokens come out, so the first token takes two of them.
    """
    one, three = measure_latency(
        runner, (1, 3), prompt_tokens=3, output_tokens=4, rounds=2, clock=ticking()
    )
    assert [len(result.requests) for result in (one, three)] == [2, 6]  # without the warm-up
    for request in (*one.requests, *three.requests):
        assert (request.prompt_tokens, request.output_tokens, request.cached_tokens) == (3, 4, 0)
        assert request.gaps == [UNIT] * 3 and request.tpot == UNIT
        assert request.ttft is not None and request.e2e == request.ttft + 3 * UNIT
    assert {request.ttft for request in one.requests} == {2 * UNIT}
    # The first of three is sent two readings before the last.
    assert [r.ttft for r in three.requests] == [4 * UNIT, 3 * UNIT, 2 * UNIT] * 2
    report = three.to_dict()
    assert report["ttft_seconds"]["p50"] == 3 * UNIT and report["batch"] == 3
    assert "requests" not in report and runner.violations == []


def test_throughput_counts_every_token(runner: FakeRunner) -> None:
    results = measure_throughput(
        runner,
        (1, 2),
        requests=5,
        prompt_tokens=(3, 9),
        output_tokens=(2, 6),
        seed=4,
        clock=ticking(),
    )
    one, two = results
    assert one.prompt_tokens == two.prompt_tokens and 15 <= one.prompt_tokens <= 45
    assert one.output_tokens == two.output_tokens and 10 <= one.output_tokens <= 30
    assert two.steps < one.steps
    for result in results:
        # One reading at the start and one at the end, one per request and one per step; a step
        # that launches nothing, because the last token is on its way, reads it as well.
        readings = round(result.seconds / UNIT)
        assert readings >= 1 + result.requests + result.steps
        assert result.output_tokens_per_second == result.output_tokens / result.seconds
        assert result.prompt_tokens_per_second == result.prompt_tokens / result.seconds
        phases = result.phase_seconds
        assert result.host_seconds_per_step * result.steps == pytest.approx(
            sum(phases.values()) - phases["wait"]
        )


def test_peak_bytes_are_units_in_use_times_their_bytes(runner: FakeRunner) -> None:
    """Two sequences of 3 tokens: a page of 4 tokens of 64 bytes each, and a slot of 64 bytes."""
    (result,) = measure_throughput(
        runner, (2,), requests=2, prompt_tokens=(3, 3), output_tokens=(1, 1)
    )
    assert result.peak_bytes == {
        "full 1 x 8": 2 * 4 * 64,
        "window 8, 1 x 8": 2 * 4 * 64,
        "linear 1 x 4 x 4": 2 * 64,
    }


def test_what_cannot_be_measured_is_refused(runner: FakeRunner) -> None:
    for options, message in (
        ({"batches": (4,)}, "batch 4 is more than max_num_seqs 3"),
        ({"batches": (0,)}, "batch must be at least 1, got 0"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"output_tokens": 0}, "output_tokens must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            measure_latency(runner, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="max_model_len is 64"):
        measure_latency(runner, prompt_tokens=100)
    for options, message in (
        ({"requests": 0}, "requests must be at least 1"),
        ({"prompt_tokens": (5, 4)}, "prompt_tokens must be 1 <= lowest <= highest, got 5 to 4"),
        ({"output_tokens": (0, 4)}, "output_tokens must be 1 <="),
    ):
        with pytest.raises(ValueError, match=message):
            measure_throughput(runner, **options)  # type: ignore[arg-type]


def test_a_request_that_fails_ends_the_measurement(runner: FakeRunner) -> None:
    runner.poisoned_uids = {1}
    with pytest.raises(Exception, match="NaN or Inf"):
        measure_latency(runner, prompt_tokens=3, output_tokens=2)
