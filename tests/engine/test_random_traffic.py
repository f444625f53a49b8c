"""Engine tokens equal the oracle's, whatever the traffic; and nothing is ever left over."""

import contextlib
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_jax.cache.plan import pages_for, table_width
from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.sampling_params import SamplingParams
from hybrid_jax.specs import StateSpec, WindowSpec
from tests.helpers.engine_checks import (
    Record,
    assert_baseline,
    drive,
    expected_tokens,
    greedy,
    prompt_of,
    small_config,
)
from tests.helpers.fake_runner import FULL, STATE, FakeRunner, window
from tests.helpers.guesses import Scripted

STACKS = (
    (FULL,),
    (window(5),),
    (STATE,),
    (FULL, STATE),
    (FULL, window(6), STATE),
    (window(1), STATE, FULL, window(9)),
)
MAX_LEN = 48


@st.composite
def traffic(draw: Any) -> dict[str, Any]:
    page = draw(st.sampled_from([1, 2, 3, 4, 16]))
    seqs = draw(st.sampled_from([1, 2, 3, 5, 17]))
    config = small_config(
        max_num_seqs=seqs,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=draw(st.sampled_from([4, 7, 16, 64])),
        page_size=page,
        run_ahead=draw(st.booleans()),
        num_speculative_tokens=draw(st.sampled_from([0, 0, 1, 3])),
    )
    requests = []
    for i in range(draw(st.integers(1, 8))):
        k = draw(st.integers(0, 20 // page))
        length = max(1, k * page + draw(st.sampled_from([-1, 0, 1, 2, 3])))
        params = SamplingParams(
            n=draw(st.sampled_from([1, 1, 1, 3])),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 2**32 - 1)),
            max_tokens=draw(st.integers(1, 18)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from([(), (5, 6, 7)])),
            min_tokens=0,
        )
        request = Request(f"r{i}", prompt_of(length, i), params)
        arrival = draw(st.integers(0, 12))
        abort = draw(st.one_of(st.none(), st.integers(0, 25)))
        requests.append((arrival, abort, request))
    return {
        "specs": draw(st.sampled_from(STACKS)),
        "config": config,
        "spare": draw(st.sampled_from([0, 0, 1, 3, 40])),
        "requests": requests,
        "chunks": draw(st.one_of(st.none(), st.integers(0, 2**20))),
        "right": draw(st.sampled_from([0.0, 0.6, 1.0])),
    }


def pool_sizes(specs: tuple[Any, ...], config: EngineConfig, spare: int, longest: int) -> Any:
    """The smallest pools that hold the longest request alone, plus `spare`."""
    counts = []
    for spec in specs:
        if isinstance(spec, StateSpec):
            counts.append(min(config.max_num_seqs, 1 + spare) * config.tokens_per_decode + 1)
            continue
        pages = pages_for(longest + config.num_speculative_tokens, config.page_size)
        if isinstance(spec, WindowSpec):
            pages = min(pages, table_width(spec, config))
        counts.append(pages + spare + 1)
    return tuple(counts)


@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
@given(traffic())
def test_any_traffic_gives_the_tokens_of_the_oracle(case: dict[str, Any]) -> None:
    specs, config, requests = case["specs"], case["config"], case["requests"]
    longest = max(len(r.prompt_token_ids) + r.params.max_tokens - 1 for _, _, r in requests)
    resolved = FakeRunner((STATE,), (2,), config).config
    runner = FakeRunner(specs, pool_sizes(specs, resolved, case["spare"], longest), config)
    engine = Engine(runner, None)
    engine._speculation.drafter = drafter_of(requests, specs, case["right"])
    if case["chunks"] is not None:
        chunks = random.Random(case["chunks"])
        engine._scheduler.chunk_limit = lambda sequence, remaining: chunks.randint(1, 9)
    aborted: set[str] = set()

    def before_step(step: int) -> None:
        for arrival, abort, request in requests:
            if arrival == step:
                engine.add_request(request)
            if abort is not None and abort == step and engine.abort(request.request_id):
                assert engine.abort(request.request_id)  # again: no harm
                aborted.add(request.request_id)

    record = drive(engine, before_step=before_step, until=26)
    check_outputs(record, requests, specs, aborted)
    assert_baseline(engine, runner)


@pytest.mark.parametrize("seed", range(120))
def test_pressure_and_interrupts_change_no_token(seed: int) -> None:
    """Short prompts that all grow: pools run out in mid-decode, and Ctrl-C hits at any step."""
    rng = random.Random(seed)
    specs = rng.choice(STACKS)
    config = small_config(
        max_num_seqs=rng.choice([2, 3, 5, 17]),
        max_model_len=MAX_LEN,
        max_num_batched_tokens=rng.choice([4, 8, 32]),
        page_size=rng.choice([1, 2, 3, 4]),
        run_ahead=rng.random() < 0.7,
        num_speculative_tokens=rng.choice([0, 0, 2]),
    )
    requests = []
    for i in range(rng.randint(3, 8)):
        sampling = {"temperature": rng.choice([0.0, 1.0]), "seed": rng.randrange(2**32)}
        params = greedy(rng.randint(8, 24), **sampling)
        request = Request(f"r{i}", prompt_of(rng.randint(1, 14), i), params)
        requests.append((rng.choice([0, 0, 0, 5, 9]), None, request))
    longest = max(len(r.prompt_token_ids) + r.params.max_tokens - 1 for _, _, r in requests)
    resolved = FakeRunner((STATE,), (2,), config).config
    counts = pool_sizes(specs, resolved, rng.choice([0, 1, 2, 5]), longest)
    runner = FakeRunner(specs, counts, config)
    engine = Engine(runner, None)
    engine._speculation.drafter = drafter_of(requests, specs, rng.choice([0.5, 1.0]))
    if rng.random() < 0.6:
        engine._scheduler.chunk_limit = lambda sequence, remaining: rng.randint(1, 5)
    interrupts = rng.choice([0.0, 0.0, 0.1])

    record = Record()
    for step in range(5000):
        for arrival, _, request in requests:
            if arrival == step:
                engine.add_request(request)
        if rng.random() < interrupts:
            setattr(runner, rng.choice(["launch_error", "read_error"]), KeyboardInterrupt())
        with contextlib.suppress(KeyboardInterrupt):
            record.add(engine.step())
        engine.check_integrity()
        if step > 9 and not engine.has_work():
            break
    check_outputs(record, requests, specs, set())
    assert_baseline(engine, runner)


def completions(request: Request, specs: Any) -> list[list[int]]:
    """What the oracle says of each completion."""
    params = request.params
    return [
        expected_tokens(request, specs, seed=(params.seed + index) % 2**32, max_model_len=MAX_LEN)
        for index in range(params.n)
    ]


def drafter_of(requests: Any, specs: Any, right: float) -> Scripted:
    """Guesses every token of every request with the probability `right`, if it guesses at all."""
    texts = [
        (*request.prompt_token_ids, *tokens)
        for _, _, request in requests
        for tokens in completions(request, specs)
    ]
    return Scripted(texts, right, 0.2, vocab_size=97)


def check_outputs(record: Record, requests: Any, specs: Any, aborted: set[str]) -> None:
    for _, _, request in requests:
        assert request.request_id in record.finals
        for index, expected in enumerate(completions(request, specs)):
            key = (request.request_id, index)
            tokens, reason = record.tokens[key], record.ends[key].finish_reason
            if reason == "abort":
                assert request.request_id in aborted
                assert tokens == expected[: len(tokens)]
                continue
            assert tokens == expected, f"{key} of {request}"
            assert reason in ("stop", "length")
        usage = record.finals[request.request_id].usage
        assert usage is not None
        total = sum(len(record.tokens[(request.request_id, i)]) for i in range(request.params.n))
        assert usage.completion_tokens == total
