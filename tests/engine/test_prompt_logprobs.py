"""Log probabilities of prompts: the oracle's, however the prompt is cut, preempted or cached."""

import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request, TokenLogprob
from hybrid_jax.generate import dense_logits
from hybrid_jax.runtime.logprobs import PROMPT_BLOCK, prompt_logprobs
from tests.helpers.engine_checks import (
    Record,
    assert_baseline,
    drive,
    expected_tokens,
    greedy,
    prompt_of,
    small_config,
)
from tests.helpers.fake_runner import FULL, STATE, FakeRunner, toy_prompt_logprob, window
from tests.helpers.real_engine import CHUNK, Rig, random_prompt, schedule_of

GetRig = Callable[[str], Rig]
Entries = tuple[TokenLogprob | None, ...]
SPECS = (FULL, window(6), STATE)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5", "gemma3")]
# In deviations of the logits, as in the comparison with Hugging Face: the oracle adds up whole
# sequences, the engine chunks. An error of one position or one token is thousands of times larger.
TOLERANCE = 2e-4


def exact(logits: np.ndarray) -> np.ndarray:
    """Log-softmax in float64."""
    values = logits.astype(np.float64)
    values -= values.max(axis=-1, keepdims=True)
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


def check(rig: Rig, prompt: tuple[int, ...], entries: Entries, count: int) -> None:
    """The entries are those of a forward pass over the whole prompt."""
    assert len(entries) == len(prompt) and entries[0] is None
    logits = dense_logits(rig.model, list(prompt))
    expected, tolerance = exact(logits)[:-1], TOLERANCE * float(logits.std())
    for token, row, entry in zip(prompt[1:], expected, entries[1:], strict=True):
        assert entry is not None and entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=tolerance)
        assert list(entry.top.values()) == pytest.approx(
            np.sort(row)[::-1][:count].tolist(), abs=tolerance
        )
        assert all(row[i] == pytest.approx(p, abs=tolerance) for i, p in entry.top.items())


@pytest.mark.parametrize("name", ["lara_mini", *SLOW])
def test_they_are_those_of_a_forward_pass(name: str, rig: GetRig) -> None:
    """Chunks of any size, next to rows that do not ask, under preemption."""
    rig_, rng = rig(name), random.Random(name)
    engine = rig_.engine(longest=44, spare=1, debug_poison=True)
    asking = [
        Request(f"a{i}", random_prompt(n, i), greedy(min(14, 44 - n), prompt_logprobs=i % 3))
        for i, n in enumerate((1, 2, CHUNK, CHUNK + 1, 39, 30))
    ]
    others = [Request(f"o{i}", random_prompt(9 + i, 50 + i), greedy(12)) for i in range(3)]
    engine._scheduler.chunk_limit = lambda sequence, remaining: rng.choice([1, 5, 16])
    before_step = schedule_of(engine, [*asking, *others], rng)
    record = drive(engine, before_step=before_step, until=15)
    assert engine.stats().preemptions > 0
    for request in asking:
        check(
            rig_,
            request.prompt_token_ids,
            record.prompts[request.request_id],
            request.params.prompt_logprobs or 0,
        )
    assert len(record.prompts) == len(asking)
    rig_.oracle.check(record, [*asking, *others])
    rig_.assert_clean(engine)


def test_who_asks_reads_no_cache_and_fills_it(rig: GetRig) -> None:
    rig_ = rig("lara_mini")
    engine, prompt = rig_.engine(prefill_alignment=4, checkpoint_interval=8), random_prompt(33, 7)
    for name, params in (
        ("warm", greedy(3)),
        ("asks", greedy(3, prompt_logprobs=1)),
        ("hits", greedy(3)),
    ):
        engine.add_request(Request(name, prompt, params))
        record = drive(engine)
        assert record.tokens[(name, 0)] == rig_.oracle(prompt, 3)
        report = record.ends[(name, 0)].cache
        assert report is not None
        if name == "asks":
            assert (report.cached_tokens, report.reason) == (0, "prompt_logprobs")
            check(rig_, prompt, record.prompts[name], 1)
        elif name == "hits":
            assert report.cached_tokens == 32
    engine.clear_prefix_cache()
    engine.add_request(Request("first", prompt, greedy(2, prompt_logprobs=0)))
    drive(engine)
    engine.add_request(Request("second", prompt, greedy(2)))
    usage = drive(engine).finals["second"].usage
    assert usage is not None and usage.cached_tokens == 32
    rig_.assert_clean(engine)


def test_a_session_that_asks_computes_its_past_again(rig: GetRig) -> None:
    from hybrid_jax import LLM

    rig_ = rig("lara_mini")
    engine = rig_.engine(debug_poison=True)
    with LLM.from_engine(engine, None).session() as session:
        session.generate(random_prompt(9, 1), greedy(5))
        output = session.generate(random_prompt(3, 2), greedy(4, prompt_logprobs=2))
        assert output.prompt_logprobs is not None
        check(rig_, tuple(output.prompt_token_ids), tuple(output.prompt_logprobs), 2)
        assert output.outputs[0].token_ids == rig_.oracle(tuple(output.prompt_token_ids), 4)
    rig_.assert_clean(engine)


def make(counts: tuple[int, ...] = (40, 30, 5), **options: Any) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(SPECS, counts, small_config(**options))
    return Engine(runner, None), runner


def assert_toy(request: Request, entries: Entries) -> None:
    """Every entry is about its own token and place, once."""
    prompt, count = request.prompt_token_ids, request.params.prompt_logprobs
    assert len(entries) == len(prompt) and entries[0] is None
    for position, entry in list(enumerate(entries))[1:]:
        assert entry is not None and entry.token_id == prompt[position]
        assert entry.logprob == toy_prompt_logprob(position, prompt[position])
        assert len(entry.top) == count and (not count or prompt[position] in entry.top)


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_no_entry_is_lost_or_doubled(seed: int, run_ahead: bool) -> None:
    """Any chunks, several completions, shared prompts, preemption and aborts."""
    rng = random.Random(seed)
    engine, runner = make((18, 14, 5), run_ahead=run_ahead, max_num_seqs=4)
    requests = [
        Request(
            f"r{i}",
            prompt_of(rng.randint(1, 40), rng.randrange(2)),
            greedy(
                rng.randint(1, 8),
                n=rng.choice([1, 1, 3]),
                prompt_logprobs=rng.choice([None, 0, 3]),
            ),
        )
        for i in range(12)
    ]
    engine._scheduler.chunk_limit = lambda sequence, remaining: rng.choice([1, 2, 7, 16])
    aborted = set[str]()
    before_step = schedule_of(engine, requests, rng, abort_share=0.2, aborted=aborted)
    record = drive(engine, before_step=before_step, until=30)
    for request in requests:
        name = request.request_id
        if request.params.prompt_logprobs is None:
            assert name not in record.prompts
        elif name not in aborted:
            assert_toy(request, record.prompts[name])
        for index in range(request.params.n if name not in aborted else 0):
            assert record.tokens[(name, index)] == expected_tokens(request, SPECS)
    assert_baseline(engine, runner)


def test_a_preempted_prompt_tells_its_entries_once() -> None:
    """Preempted in the middle of its prefill, with the results of a chunk on their way."""
    engine, runner = make((13, 30, 5), max_num_seqs=2)
    old = Request("old", prompt_of(6), greedy(40))
    asks = Request("asks", prompt_of(30, 1), greedy(3, prompt_logprobs=2))
    engine.add_request(old)
    engine.step()
    engine._scheduler.chunk_limit = lambda sequence, remaining: 2
    engine.add_request(asks)
    record: Record = drive(engine)
    assert engine.stats().preemptions > 0
    assert_toy(asks, record.prompts["asks"])
    assert_baseline(engine, runner)


def test_all_are_computed_again_after_a_step_that_failed() -> None:
    engine, runner = make()
    asks = Request("asks", prompt_of(40), greedy(3, prompt_logprobs=1))
    engine.add_request(asks)
    engine.step()
    engine.step()
    original = engine._builder.build
    engine._builder.build = lambda plan: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine._builder.build = original  # type: ignore[method-assign]
    record = drive(engine)
    assert_toy(asks, record.prompts["asks"])
    assert_baseline(engine, runner)


def test_a_prompt_whose_logits_are_broken_ends_in_an_error(monkeypatch: Any) -> None:
    from tests.helpers import fake_runner

    monkeypatch.setattr(fake_runner, "toy_prompt_logprob", lambda p, t: np.full(p.shape, np.nan))
    engine, runner = make()
    engine.add_request(Request("asks", prompt_of(9), greedy(3, prompt_logprobs=1)))
    engine.add_request(Request("other", prompt_of(9, 1), greedy(3)))
    record = drive(engine)
    assert "prompt's token 1 are NaN or Inf" in str(record.ends[("asks", 0)].error)
    assert record.ends[("other", 0)].finish_reason == "length"
    assert_baseline(engine, runner)


@pytest.mark.parametrize("num_tokens", [1, PROMPT_BLOCK, PROMPT_BLOCK + 1, 3 * PROMPT_BLOCK - 5])
@pytest.mark.parametrize("count", [0, 3])  # an engine may report the tokens' own only
@pytest.mark.parametrize("num_rows", [1, PROMPT_BLOCK + 3])
def test_blocks_cover_every_token(num_tokens: int, num_rows: int, count: int) -> None:
    rng = np.random.default_rng(num_tokens)
    hidden = rng.normal(size=(num_tokens, 5)).astype(np.float32)
    head = rng.normal(size=(5, 70)).astype(np.float32)
    targets = rng.integers(0, 70, num_tokens).astype(np.int32)
    widest = []

    @jax.jit
    def run(states: jax.Array, tokens: jax.Array) -> Any:
        def logits_of(x: jax.Array) -> jax.Array:
            widest.append(x.shape[0])
            return x @ head

        return prompt_logprobs(logits_of, states, tokens, num_rows=num_rows, count=count)

    chosen, ids, top = map(np.asarray, run(hidden, targets))
    want = exact(hidden.astype(np.float64) @ head)
    # Float32 products of five terms.
    np.testing.assert_allclose(chosen, want[np.arange(num_tokens), targets], atol=2e-5)
    order = np.argsort(-want, axis=1)[:, :count]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(top, np.take_along_axis(want, order, axis=1), atol=2e-5)
    assert max(widest) == min(num_tokens, max(num_rows, PROMPT_BLOCK))
    nothing = run(hidden, np.full(num_tokens, -1, np.int32))
    assert not np.asarray(nothing[0]).any() and (np.asarray(nothing[1]) == -1).all()
