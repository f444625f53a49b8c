"""Real models on the engine: the oracle's tokens under any traffic, with NaN in all free memory."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.runtime.runner import Runner
from hybrid_jax.sampling_params import SamplingParams
from tests.helpers.engine_checks import Record, drive, greedy
from tests.helpers.real_engine import (
    CHUNK,
    MAX_LEN,
    Rig,
    border_lengths,
    engine_config,
    poison,
    random_prompt,
    random_requests,
    schedule_of,
)

MODELS = ("lara_mini", "qwen3_5", "gemma3")
OTHERS = ("qwen3-window", "qwen3_next", "qwen3_5_moe", "olmo_hybrid", "gemma2", "lara_mini-untied")
GetRig = Callable[[str], Rig]


def run(rig: Rig, engine: Engine, requests: list[Request], rng: random.Random) -> Record:
    """Drives `requests` at random times, a third of them aborted, and checks all that can be."""
    aborted: set[str] = set()
    before_step = schedule_of(
        engine,
        requests,
        rng,
        abort_share=0.3,
        aborted=aborted,
        after=lambda: poison(engine, rig.runner),
    )
    record = drive(engine, before_step=before_step, until=24)
    rig.oracle.check(record, requests, aborted)
    rig.assert_clean(engine)
    return record


def all_at_once(rig: Rig, engine: Engine, requests: list[Request]) -> Record:
    for request in requests:
        engine.add_request(request)
    record = drive(engine, before_step=lambda step: poison(engine, rig.runner))
    rig.assert_clean(engine)
    return record


def random_case(rig: Rig, seed: int) -> Engine:
    """One random traffic through one random engine; returns it for its counters."""
    rng = random.Random(seed)
    requests = random_requests(rng, 8)
    longest = max(len(r.prompt_token_ids) + r.params.max_tokens - 1 for r in requests)
    options = {"max_num_seqs": (5, 3, 1)[seed % 3], "run_ahead": seed % 4 != 1}
    small = rng.random() < 0.7
    engine = rig.engine(longest=longest if small else None, spare=rng.randint(0, 6), **options)
    if rng.random() < 0.7:
        engine._scheduler.chunk_limit = lambda sequence, remaining: rng.randint(1, CHUNK)
    run(rig, engine, requests, rng)
    return engine


@pytest.mark.parametrize("name", MODELS)
def test_random_traffic_gives_the_tokens_of_the_oracle(name: str, rig: GetRig) -> None:
    """Arrivals, aborts, chunk limits, batch mates and pool sizes are random."""
    for seed in range(8):
        random_case(rig(name), seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS + OTHERS)
def test_much_random_traffic_gives_the_tokens_of_the_oracle(name: str, rig: GetRig) -> None:
    for seed in range(100, 140):
        random_case(rig(name), seed)


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_preemption_changes_no_token(name: str, run_ahead: bool, rig: GetRig) -> None:
    """Short prompts grow at once in pools for little more than one of them."""
    rig_ = rig(name)
    requests = [Request(f"r{i}", random_prompt(2 + i, 0), greedy(20 - i)) for i in range(5)]
    engine = rig_.engine(longest=24, spare=5, run_ahead=run_ahead)
    record = all_at_once(rig_, engine, requests)
    rig_.oracle.check(record, requests)
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("name", MODELS)
def test_prompts_around_every_border(name: str, rig: GetRig) -> None:
    """Lengths k * B + {-1, 0, 1, 2, 3} of pages and chunks, and 1 to 3 tokens: one batch."""
    rig_ = rig(name)
    requests = [Request(f"r{n}", random_prompt(n, 0), greedy(12)) for n in border_lengths()]
    rig_.oracle.check(all_at_once(rig_, rig_.engine(), requests), requests)


@pytest.mark.parametrize("name", MODELS)
def test_a_prefill_may_be_cut_anywhere(name: str, rig: GetRig) -> None:
    """First chunks of 1 token to a whole one, each followed by chunks of another size."""
    rig_ = rig(name)
    prompt = random_prompt(2 * CHUNK + 3, 0)
    firsts = range(1, CHUNK + 1)
    requests = [Request(f"{first}", prompt, greedy(4)) for first in firsts]
    engine = rig_.engine()

    def limit(sequence: object, remaining: int) -> int:
        first = int(sequence.request.request_id)  # type: ignore[attr-defined]
        return first if remaining == len(prompt) else 1 + first * 7 % CHUNK

    engine._scheduler.chunk_limit = limit  # type: ignore[assignment]
    rig_.oracle.check(all_at_once(rig_, engine, requests), requests)


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_may_fill_max_model_len(name: str, rig: GetRig) -> None:
    """The longest prompt there is, and an output to the very end, next to short ones."""
    rig_ = rig(name)
    lengths = (MAX_LEN - 1, MAX_LEN - 12, 3)
    requests = [
        Request(f"r{n}", random_prompt(n, 0), greedy(min(12, MAX_LEN - n))) for n in lengths
    ]
    rig_.oracle.check(all_at_once(rig_, rig_.engine(), requests), requests)


def test_samples_depend_on_nothing_but_the_request(rig: GetRig) -> None:
    """Drawn tokens are the same alone, with mates, cut differently and after preemption."""
    rig_ = rig("lara_mini")
    options = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.3, "max_tokens": 12}
    requests = [
        Request(f"r{i}", random_prompt(n, 1), SamplingParams(seed=i, ignore_eos=True, **options))  # type: ignore[arg-type]
        for i, n in enumerate((1, 6, 17, 11))
    ]
    alone = [all_at_once(rig_, rig_.engine(), [request]) for request in requests]
    together = all_at_once(rig_, rig_.engine(run_ahead=False), requests)
    small = rig_.engine(longest=30, spare=4)
    small._scheduler.chunk_limit = lambda sequence, remaining: 3
    preempted = all_at_once(rig_, small, requests)
    assert small.stats().preemptions > 0
    for record, request in zip(alone, requests, strict=True):
        tokens = record.tokens[(request.request_id, 0)]
        assert len(tokens) == 12
        assert tokens == together.tokens[(request.request_id, 0)]
        assert tokens == preempted.tokens[(request.request_id, 0)]
    assert len({tuple(r.tokens.popitem()[1]) for r in alone}) == len(alone)


def test_enforce_eager_gives_the_same_tokens(rig: GetRig) -> None:
    rig_ = rig("lara_mini-untied")
    runner = Runner(rig_.model, engine_config(enforce_eager=True), fill=float("nan"))
    engine = Engine(runner, None)
    requests = [Request(f"r{n}", random_prompt(n, 0), greedy(2)) for n in (2, 7)]
    for request in requests:
        engine.add_request(request)
    rig_.oracle.check(drive(engine), requests)


@pytest.mark.slow
@pytest.mark.parametrize("max_num_seqs, page_size", [(1, 3), (3, 1), (3, 16)])
def test_other_shapes(max_num_seqs: int, page_size: int, tmp_path: Path) -> None:
    """Device arrays of one row, odd page sizes, an odd token budget and several row buckets."""
    options = {"row_buckets": (2, 3)[: max_num_seqs or 1], "token_buckets": (4, 7)}
    rig_ = Rig(
        "lara_mini-untied",
        tmp_path,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=7,
        page_size=page_size,
        **options,
    )
    for seed in range(6):
        rng = random.Random(seed)
        engine = rig_.engine()
        run(rig_, engine, random_requests(rng, 6), rng)
