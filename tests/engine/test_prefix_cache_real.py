"""Prefix hits on a real runner: tokens, log probabilities and penalties as without a cache.

The model has full, window and linear layers. Fresh memory is NaN, and so is everything freed.
"""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from tests.helpers.engine_checks import Record, drive, greedy
from tests.helpers.real_engine import Rig, random_prompt

MAX_LEN, GRID = 256, 64


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(
        "lara_mini",
        tmp_path_factory.mktemp("prefix"),
        max_model_len=MAX_LEN,
        max_num_batched_tokens=144,
        token_buckets=(144,),
        checkpoint_interval=128,
        debug_poison=True,
    )


def run(engine: Engine, requests: list[Request], *, together: bool = False) -> Record:
    """Serves all requests, at once or one after the other."""
    record = Record()
    for batch in [requests] if together else [[r] for r in requests]:
        for request in batch:
            engine.add_request(request)
        drive(engine, record=record)
    return record


def compare(rig: Rig, requests: list[Request], **options: Any) -> dict[str, int]:
    """Runs with and without the cache; returns the tokens each request hit."""
    together = options.pop("together", False)
    plain = run(rig.engine(prefix_cache=False), requests, together=together)
    engine = rig.engine(**options)
    cached = run(engine, requests, together=together)
    assert cached.tokens == plain.tokens
    rig.assert_clean(engine)
    for request in requests:
        assert plain.finals[request.request_id].usage.cached_tokens == 0  # type: ignore[union-attr]
    return {k: e.usage.cached_tokens for k, e in cached.finals.items() if e.usage}


@pytest.mark.parametrize("together", [False, True])
def test_hits_change_no_token(together: bool, rig: Rig) -> None:
    system = random_prompt(150, 0)
    prompts = [system + random_prompt(n, n) for n in (1, 7, 20, 20, 45, 64)]
    prompts += [system, system[:129], system[:128]]
    requests = [Request(f"r{i}", prompt, greedy(5)) for i, prompt in enumerate(prompts)]
    hits = compare(rig, requests, together=together)
    # The last one is too short for the state at 128, and nobody kept one at 64.
    assert list(hits.values()) == [0, 128, 128, 128, 128, 128, 128, 128, 0]
    expected = rig.oracle(prompts[1], 5)
    assert run(rig.engine(), requests[:2]).tokens[("r1", 0)] == expected


def test_the_second_turn_goes_on_from_the_first(rig: Rig) -> None:
    engine, prompt = rig.engine(), random_prompt(70, 1)
    (answer,) = run(engine, [Request("a", prompt, greedy(75))]).tokens.values()
    second = prompt + tuple(answer) + random_prompt(9, 2)
    record = run(engine, [Request("b", second, greedy(6))])
    assert record.finals["b"].usage.cached_tokens == 128  # type: ignore[union-attr]
    assert record.tokens[("b", 0)] == rig.oracle(second, 6)


def test_log_probabilities_and_penalties_see_the_whole_prompt(rig: Rig) -> None:
    prompt = random_prompt(140, 3)
    params = greedy(
        6, repetition_penalty=1.6, presence_penalty=0.4, frequency_penalty=0.3, logprobs=2
    )
    engine = rig.engine()
    requests = [Request(f"r{i}", prompt, params) for i in range(2)]
    events: dict[str, list[Any]] = {}
    for request in requests:
        engine.add_request(request)
        while engine.has_work():
            for event in engine.step():
                events.setdefault(event.request_id, []).append(event)
    cold, warm = ([e.logprobs[0] for e in events[r.request_id]] for r in requests)
    assert events["r1"][-1].cache.cached_tokens == 128
    assert [x.token_id for x in cold] == [x.token_id for x in warm]
    for a, b in zip(cold, warm, strict=True):
        # Other bucket shapes round matrix products differently: a few float32 ulps.
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
        assert a.top == pytest.approx(b.top, abs=1e-5)


@st.composite
def trees(draw: Any) -> dict[str, Any]:
    prompts: list[tuple[int, ...]] = []
    for i in range(draw(st.integers(2, 6))):
        stem: tuple[int, ...] = ()
        if prompts and draw(st.integers(0, 5)):
            stem = draw(st.sampled_from(prompts))
            at = draw(st.sampled_from([len(stem), *range(0, len(stem) + 1, GRID)]))
            stem = stem[: max(0, at + draw(st.sampled_from([-1, 0, 0, 1, 3])))]
        k = draw(st.integers(0, 2))
        tail = max(0 if stem else 1, k * GRID + draw(st.sampled_from([-1, 0, 1, 2, 3])))
        prompts.append((stem + random_prompt(tail, i))[:200] or (5,))
    return {
        "requests": [
            Request(f"r{i}", prompt, greedy(draw(st.sampled_from([1, 3, 12]))))
            for i, prompt in enumerate(prompts)
        ],
        "spare": draw(st.sampled_from([0, 5, 40])),
        "run_ahead": draw(st.booleans()),
        "together": draw(st.booleans()),
    }


def check_tree(rig: Rig, case: dict[str, Any]) -> None:
    longest = max(len(r.prompt_token_ids) + r.params.max_tokens for r in case["requests"])
    compare(
        rig,
        case["requests"],
        together=case["together"],
        run_ahead=case["run_ahead"],
        longest=longest,
        spare=case["spare"],
    )


QUICK = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@settings(max_examples=12, **QUICK)
@given(case=trees())
def test_any_tree_of_prompts(case: dict[str, Any], rig: Rig) -> None:
    check_tree(rig, case)


@pytest.mark.slow
@settings(max_examples=150, **QUICK)
@given(case=trees())
def test_many_trees_of_prompts(case: dict[str, Any], rig: Rig) -> None:
    check_tree(rig, case)


def test_several_completions_share_the_prompt(rig: Rig) -> None:
    """And each samples as if it were alone."""
    rng, requests = random.Random(0), []
    for i, length in enumerate((1, 2, 5, 64, 65, 131)):
        sampling = {"temperature": 1.0, "seed": rng.randrange(2**32), "n": 3}
        requests.append(Request(f"r{i}", random_prompt(length, i), greedy(8, **sampling)))
    for prefix_cache in (True, False):
        record = run(rig.engine(prefix_cache=prefix_cache), requests)
        for request in requests:
            for index in range(3):
                alone = greedy(8, temperature=1.0, seed=request.params.seed + index)
                single = Request("alone", request.prompt_token_ids, alone)
                expected = run(rig.engine(prefix_cache=False), [single]).tokens[("alone", 0)]
                assert record.tokens[(request.request_id, index)] == expected
                report = record.ends[(request.request_id, index)].cache
                length = len(request.prompt_token_ids)
                assert report is not None
                assert report.cached_tokens == (length - 1 if index and length > 1 else 0)
