"""Speculation changes no token, whatever is guessed, and nothing of it is left over.

The model has full, window and linear layers, which have a convolution. Fresh memory is NaN.
"""

import os
import random
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from hybrid_jax import LLM, StructuredOutput
from hybrid_jax.bundled import bundled_model
from hybrid_jax.drafts import Drafter, PromptLookup
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.generate import dense_logits, generate
from hybrid_jax.loading import load_model
from hybrid_jax.sampling_params import SamplingParams
from tests.helpers import guesses
from tests.helpers.engine_checks import Record, drive, greedy
from tests.helpers.real_engine import (
    MAX_LEN,
    ROWS,
    Rig,
    poison,
    random_prompt,
    random_requests,
    schedule_of,
)
from tests.helpers.text import byte_tokenizer

SEED = int(os.environ.get("HYBRID_JAX_TEST_SEED") or int.from_bytes(os.urandom(3)))
HINT = f"HYBRID_JAX_TEST_SEED={SEED}"
K = 2
GRID = {"prefill_alignment": 8, "checkpoint_interval": 8}  # small enough for these prompts


Scripted = partial(guesses.Scripted, seed=SEED)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig("lara_mini", tmp_path_factory.mktemp("speculation"), num_speculative_tokens=K)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """The same model without speculation."""
    return Rig("lara_mini", tmp_path_factory.mktemp("plain"))


def engine_of(rig: Rig, drafter: Drafter, **options: Any) -> Engine:
    engine = rig.engine(debug_poison=True, **options)
    engine._speculation.drafter = drafter
    return engine


def serve(engine: Engine, requests: Iterable[Request]) -> Record:
    for request in requests:
        engine.add_request(request)
    return drive(engine)


def texts_of(rig: Rig, requests: Iterable[Request]) -> list[tuple[int, ...]]:
    """Prompts with what greedily follows them, and a bit more."""
    return [
        r.prompt_token_ids + tuple(rig.oracle(r.prompt_token_ids, r.params.max_tokens + K))
        for r in requests
    ]


def check_statistics(engine: Engine, record: Record) -> None:
    """Every decode step brings the right guesses and one token, or ends with a right guess; every
    prompt brings one token."""
    stats, usages = engine.stats().speculation, [end.usage for end in record.finals.values()]
    assert sum(u.draft_tokens for u in usages if u) == stats.draft_tokens
    assert sum(u.accepted_tokens for u in usages if u) == stats.accepted_tokens
    assert stats.accepted_tokens <= stats.draft_tokens <= K * stats.num_verified
    decoded = sum(len(tokens) - 1 for tokens in record.tokens.values())
    most = stats.num_verified + stats.accepted_tokens
    assert most - len(record.tokens) <= decoded <= most


@pytest.mark.parametrize("kind", ["right", "wrong", "mixed", "none", "lookup"])
def test_greedy_tokens_after_short_prompts(kind: str, rig: Rig) -> None:
    """Shorter and longer than the convolution, several at once."""
    requests = [Request(f"r{n}", random_prompt(n, SEED), greedy(12)) for n in range(1, 9)]
    texts = texts_of(rig, requests)
    drafters: dict[str, Drafter] = {
        "right": Scripted(texts, 1.0),
        "wrong": Scripted(texts, 0.0),
        "mixed": Scripted(texts, 0.6, none=0.3),
        "none": Scripted(texts, 1.0, none=1.0),
        "lookup": PromptLookup(),
    }
    engine = engine_of(rig, drafters[kind])
    record = serve(engine, requests)
    rig.oracle.check(record, requests)
    rig.assert_clean(engine)
    check_statistics(engine, record)
    stats = engine.stats().speculation
    if kind == "right":
        # 11 tokens after the prompt's: three steps of three and one of two for each request.
        assert (stats.num_verified, stats.accepted_tokens) == (8 * 4, 8 * 8)
    if kind in ("wrong", "none"):
        assert (stats.num_verified, stats.accepted_tokens) == (8 * 11, 0)
        assert (stats.draft_tokens == 0) == (kind == "none")


@pytest.mark.parametrize("swap_bytes", [0, 2**20])
def test_any_traffic(swap_bytes: int, rig: Rig) -> None:
    """Chunked prompts, preemptions, hits, aborts; all free memory is garbage before every step."""
    for seed in range(3):
        rng = random.Random(f"{SEED} {seed}")
        requests = random_requests(rng, 14)
        longest = max(len(r.prompt_token_ids) + r.params.max_tokens - 1 for r in requests)
        engine = engine_of(
            rig,
            Scripted(texts_of(rig, requests), rng.choice([0.5, 0.8, 1.0]), none=0.2),
            longest=longest,
            spare=rng.choice([0, 2, 5]),
            swap_bytes=swap_bytes,
            **GRID,
        )
        engine._scheduler.chunk_limit = lambda sequence, remaining, rng=rng: rng.choice([1, 3, 16])
        aborted: set[str] = set()
        before_step = schedule_of(
            engine,
            requests,
            rng,
            abort_share=0.2,
            aborted=aborted,
            after=lambda engine=engine: poison(engine, rig.runner),
        )
        record = drive(engine, before_step=before_step, until=25)
        rig.oracle.check(record, requests, aborted)
        rig.assert_clean(engine)
        assert engine.stats().speculation.accepted_tokens > 0, HINT
        if swap_bytes:
            assert engine.stats().swap.used_bytes == 0


def test_a_preempted_sequence_goes_on(rig: Rig) -> None:
    """Two that grow until there is room for one only, with guesses of every kind."""
    for swap_bytes in (0, 2**20):
        requests = [Request(f"r{i}", random_prompt(9 + i, SEED), greedy(30)) for i in range(2)]
        engine = engine_of(
            rig,
            Scripted(texts_of(rig, requests), 0.7, none=0.2),
            longest=42,
            spare=2,
            swap_bytes=swap_bytes,
            **GRID,
        )
        record = serve(engine, requests)
        rig.oracle.check(record, requests)
        rig.assert_clean(engine)
        assert engine.stats().preemptions > 0, HINT
        assert (engine.stats().swap.num_in > 0) == bool(swap_bytes), HINT


@pytest.mark.parametrize("right", [1.0, 0.5])
def test_generated_tokens_are_hit(right: float, rig: Rig) -> None:
    """A state at a multiple of the grid is kept, also where a step of several tokens passes it.

    Steps of three tokens from the sixth on pass 32 without ending there.
    """
    first = Request("a", random_prompt(6, SEED), greedy(30))
    (text,) = texts_of(rig, [first])
    second = Request("b", text[:34] + random_prompt(5, SEED + 1), greedy(9))
    engine = engine_of(rig, Scripted([text, *texts_of(rig, [second])], right), **GRID)
    rig.oracle.check(serve(engine, [first]), [first])
    record = serve(engine, [second])
    rig.oracle.check(record, [second])
    assert record.finals["b"].usage.cached_tokens == 32, HINT  # type: ignore[union-attr]
    rig.assert_clean(engine)


@pytest.mark.parametrize("right", [0.0, 0.6])
def test_a_kept_prefix_holds_what_was_right(right: float, rig: Rig) -> None:
    """Held in the middle of guesses, gone on from, and gone on from once more at its end.

    Wrong guesses reach a page that the prefix has no part in.
    """
    first = Request("a", random_prompt(6, SEED), greedy(20), keep=True)
    (text,) = texts_of(rig, [first])
    engine = engine_of(rig, Scripted([text], right))
    engine.add_request(first)
    record, held = Record(), []
    for _ in range(4):
        record.add(engine.step())
        held.append(engine.hold("a"))
    record = drive(engine, record=record)
    rig.oracle.check(record, [first])
    kept = record.ends[("a", 0)].kept
    assert kept is not None and kept.length == len(first.prompt_token_ids) + 19
    for name, prefix in zip("bcdef", [*held, kept], strict=True):
        assert prefix.length > 0 and prefix.token_ids == text[: prefix.length]
        prompt = text[: prefix.length] + random_prompt(3, SEED)
        request = Request(name, prompt, greedy(8), prefix=prefix)
        engine._speculation.drafter = Scripted(texts_of(rig, [request]), 0.6)
        after = serve(engine, [request])
        rig.oracle.check(after, [request])
        assert after.finals[name].usage.cached_tokens == prefix.length  # type: ignore[union-attr]
    rig.assert_clean(engine)


@pytest.mark.parametrize("length", [MAX_LEN - 4, MAX_LEN - 3, MAX_LEN - 2, MAX_LEN - 1])
def test_guesses_beyond_the_longest_sequence(length: int, rig: Rig) -> None:
    request = Request("a", random_prompt(length, SEED), greedy(12))
    (text,) = texts_of(rig, [request])
    engine = engine_of(rig, Scripted([text], 1.0))
    tokens = serve(engine, [request]).tokens[("a", 0)]
    assert tokens == rig.oracle(request.prompt_token_ids, MAX_LEN - length)
    rig.assert_clean(engine)


def test_where_a_sequence_ends(rig: Rig) -> None:
    """At a stop token among right guesses, barred by min_tokens or not; or at a stop string."""
    prompt = random_prompt(7, SEED)
    wanted = rig.oracle(prompt, 14)
    drafter = Scripted([(*prompt, *wanted)], 1.0)
    tokenizer = byte_tokenizer()
    for end in range(1, 8):
        stop = wanted[end]
        first = wanted.index(stop)
        engine = engine_of(rig, drafter, tokenizer=tokenizer)
        words = tokenizer.decode(wanted[end : end + 2], skip_special_tokens=False)
        options: list[dict[str, Any]] = [{"stop_token_ids": [stop]}, {"stop": [words]}]
        requests = [Request(f"r{i}", prompt, greedy(14, **o)) for i, o in enumerate(options)]
        record = serve(engine, requests)
        assert record.tokens[("r0", 0)] == wanted[: first + 1], HINT
        assert record.ends[("r0", 0)].stop_reason == stop
        text = tokenizer.decode(wanted, skip_special_tokens=False)
        if "\ufffd" not in words and words in text:
            assert record.text[("r1", 0)] == text[: text.index(words)], HINT
            assert record.ends[("r1", 0)].stop_reason == words
        rig.assert_clean(engine)


SAMPLED = (
    SamplingParams(temperature=1.3, seed=SEED, max_tokens=10, n=3),
    SamplingParams(temperature=0.8, top_p=0.9, min_p=0.02, seed=SEED, max_tokens=12, logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, max_tokens=12),
    SamplingParams(temperature=1.0, frequency_penalty=1.0, seed=SEED, max_tokens=9, top_k=8),
    SamplingParams(temperature=0.7, logit_bias={5: 3.0}, seed=SEED, min_tokens=5, max_tokens=12),
)


@pytest.mark.slow
def test_what_a_request_may_ask_for(rig: Rig, plain: Rig) -> None:
    """Token for token as without speculation; penalties see the right guesses only."""
    stops = {"stop_token_ids": list(range(0, 128, 3)), "prompt_logprobs": 1}
    params = [*SAMPLED, replace(SAMPLED[-1], **stops)]
    requests = [Request(f"r{i}", random_prompt(4 + 3 * i, SEED), p) for i, p in enumerate(params)]
    wanted = serve(plain.engine(), requests)
    texts = [
        requests[int(name[1:])].prompt_token_ids + tuple(tokens)
        for (name, _), tokens in wanted.tokens.items()
    ]

    for right in (1.0, 0.5):
        engine = engine_of(rig, Scripted(texts, right))
        record = serve(engine, requests)
        assert record.tokens == wanted.tokens, HINT
        for key, end in wanted.ends.items():
            assert record.ends[key].finish_reason == end.finish_reason
        for name, logprobs in wanted.prompts.items():
            assert [p and p.token_id for p in logprobs] == [
                p and p.token_id for p in record.prompts[name]
            ]
        assert engine.stats().speculation.accepted_tokens > 0
        rig.assert_clean(engine)


@pytest.mark.slow
def test_log_probabilities(rig: Rig, plain: Rig) -> None:
    request = Request("a", random_prompt(9, SEED), greedy(11, logprobs=2))
    (text,) = texts_of(rig, [request])

    def logprobs(engine: Engine) -> list[Any]:
        engine.add_request(request)
        found = []
        while engine.has_work():
            for event in engine.step():
                found += event.logprobs or ()
        return found

    wanted = logprobs(plain.engine())
    found = logprobs(engine_of(rig, Scripted([text], 0.7)))
    assert [p.token_id for p in found] == [p.token_id for p in wanted]
    assert [list(p.top) for p in found] == [list(p.top) for p in wanted]
    # Both are float32; products of several rows are summed in another order than those of one.
    np.testing.assert_allclose(
        [p.logprob for p in found], [p.logprob for p in wanted], rtol=1e-4, atol=1e-5
    )


def test_the_distribution_of_sampled_tokens(rig: Rig) -> None:
    """Triples of tokens against their exact probabilities, which come from the oracle's logits.

    The guess is the likeliest next token and then one that is often wrong. A chi-squared test;
    right code fails it once in a million runs.
    """
    runs, top = 400, 3
    prompt = list(random_prompt(6, SEED))

    def choices(token_ids: list[int]) -> dict[int, float]:
        logits = np.asarray(dense_logits(rig.model, token_ids))[-1].astype(np.float64)
        best = np.argsort(-logits)[:top]
        weights = np.exp((logits[best] - logits.max()) / 2.0)
        return dict(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))

    first = choices(prompt)
    seconds = {a: choices([*prompt, a]) for a in first}
    exact = {
        (a, b, c): p * q * r
        for a, p in first.items()
        for b, q in seconds[a].items()
        for c, r in choices([*prompt, a, b]).items()
    }
    guesses = {a: max(some, key=some.__getitem__) for a, some in seconds.items()}
    engine = engine_of(rig, lambda ids, count: [guesses.get(ids[-1], 0), 7])
    params = SamplingParams(temperature=2.0, top_k=top, max_tokens=3, ignore_eos=True)
    record = serve(
        engine,
        [Request(f"r{i}", tuple(prompt), replace(params, seed=SEED + i)) for i in range(runs)],
    )
    counts = dict.fromkeys(exact, 0)
    for tokens in record.tokens.values():
        counts[tuple(tokens)] += 1
    assert runs / 10 < engine.stats().speculation.accepted_tokens < 2 * runs  # both ways were taken
    likely = [key for key, p in exact.items() if p * runs >= 5]  # as the test's theory asks
    observed = [counts[key] for key in likely]
    wanted = [exact[key] * runs for key in likely]
    if (rest := runs - sum(wanted)) > 1e-6:
        observed.append(runs - sum(observed))
        wanted.append(rest)
    p_value = chisquare(observed, np.array(wanted) * runs / sum(wanted)).pvalue
    assert p_value > 1e-6, f"{HINT}: {observed} {wanted}"


@pytest.mark.slow
def test_structured_output_has_no_guesses() -> None:
    """In the same steps as a text that repeats itself and has many."""
    form = StructuredOutput(regex="(ab)+c|[d-f]{3}")
    prompt = "and the LORD said unto Moses, and the LORD said unto Aaron, and the LORD said"
    params = [greedy(20), SamplingParams(structured=form, seed=SEED, max_tokens=40)]
    options = {"max_num_seqs": 2, "max_model_len": 128, "max_num_batched_tokens": 32}
    with LLM(bundled_model(), dtype="float32", num_speculative_tokens=3, **options) as llm:
        texts = llm.generate([prompt, prompt], params, use_tqdm=False)
        model = load_model(bundled_model(), dtype="float32")
        assert texts[0].outputs[0].token_ids == generate(model, texts[0].prompt_token_ids, 20)
        assert texts[1].outputs[0].finish_reason == "stop", HINT
        assert re.fullmatch(form.source[1], texts[1].outputs[0].text), HINT
        guessed = [output.usage.draft_tokens for output in texts if output.usage]
        assert guessed[0] > 0 == guessed[1]
        assert llm.stats().speculation.draft_tokens == guessed[0]


def test_k_plus_one_rows_and_no_copies(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often guesses are wrong."""
    requests = [Request(f"r{i}", random_prompt(8, SEED + i), greedy(14)) for i in range(2)]
    engine = engine_of(rig, Scripted(texts_of(rig, requests), 0.5), prefix_cache=False)
    touched: list[Any] = []
    for name in ("copy", "write", "read"):
        monkeypatch.setattr(rig.runner, name, lambda group, *args: touched.append(args))
    peaks = []
    for request in requests:
        engine.add_request(request)
    record = drive(engine, before_step=lambda step: peaks.append(engine.stats().caches[0].peak))
    rig.oracle.check(record, requests)
    states = [g for g in engine.stats().caches if g.name.endswith("linear")]
    assert states and all(group.peak == 2 * (K + 1) for group in states)
    assert not touched


def test_one_step_of_each_kind_is_compiled(rig: Rig) -> None:
    """Whether there are guesses or not; with two prompts and five rows in every way."""
    assert rig.runner.config.run_ahead is False
    before = rig.runner.num_compiles
    requests = [Request(f"r{i}", random_prompt(3 + i, 0), greedy(5)) for i in range(ROWS)]
    serve(engine_of(rig, Scripted(texts_of(rig, requests), 1.0, none=0.5)), requests)
    assert rig.runner.num_compiles - before in (0, 2)  # 2: this test ran first
    compiles = rig.runner.num_compiles
    serve(engine_of(rig, Scripted([], 1.0, none=1.0)), requests)
    assert rig.runner.num_compiles == compiles
