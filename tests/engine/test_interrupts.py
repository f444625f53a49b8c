"""Ctrl-C at the worst moment loses no token and no event, and nothing is counted twice."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.interrupts import uninterrupted
from hybrid_jax.engine.types import Request
from tests.helpers.engine_checks import (
    Record,
    assert_baseline,
    expected_tokens,
    greedy,
    prompt_of,
    small_config,
)
from tests.helpers.fake_runner import FULL, STATE, FakeRunner, window

SPECS = (FULL, window(6), STATE)


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    """As at a terminal; processes that a shell starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Letters:
    """A tokenizer: a letter per token; tells when it is used."""

    def __init__(self, on_decode: Callable[[], object] = lambda: None) -> None:
        self.on_decode = on_decode

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.on_decode()
        return "".join(chr(97 + token % 26) for token in token_ids)


def once_after(calls: int) -> Callable[[], None]:
    """Sends this process Ctrl-C at one of its calls."""
    left = [calls]

    def interrupt(*_: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)

    return interrupt


def make(tokenizer: Letters, **options: Any) -> tuple[Engine, FakeRunner, list[Request]]:
    config = small_config(max_num_seqs=4, prefill_alignment=4, checkpoint_interval=8, **options)
    runner = FakeRunner(SPECS, (60, 40, 20), config)
    engine = Engine(runner, tokenizer)
    requests = [Request(f"r{i}", prompt_of(3 + 5 * i, i), greedy(9)) for i in range(4)]
    for request in requests:
        engine.add_request(request)
    return engine, runner, requests


def drive(engine: Engine, before_step: Callable[[int], None] = lambda step: None) -> Record:
    """As `engine_checks.drive`, through interrupts; there must be one."""
    record, interrupts, step = Record(), 0, 0
    while engine.has_work():
        try:
            before_step(step)
            record.add(engine.step())
        except KeyboardInterrupt:
            interrupts += 1
        step += 1
        assert step < 500
    assert interrupts == 1
    return record


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("calls", [1, 2, 5, 17, 40, 60])
def test_no_token_and_no_text_is_lost(calls: int, run_ahead: bool) -> None:
    engine, runner, requests = make(Letters(once_after(calls)), run_ahead=run_ahead)
    record = drive(engine)
    for request in requests:
        expected = expected_tokens(request, SPECS)
        assert record.tokens[(request.request_id, 0)] == expected
        text = Letters().decode(expected, skip_special_tokens=True)
        assert record.text[(request.request_id, 0)] == text
        assert record.finals[request.request_id].finish_reason == "length"
    assert_baseline(engine, runner)


@pytest.mark.parametrize("where", ["remove", "abort", "ended"])
def test_an_abort_is_heard_once(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner, requests = make(Letters())
    owner: Any = {"remove": engine._scheduler, "abort": engine._outputs, "ended": engine._inbox}
    function, interrupt = getattr(owner[where], where), once_after(1)

    def interrupted(*arguments: Any) -> Any:
        result = function(*arguments)
        interrupt()
        return result

    def abort(step: int) -> None:
        if step == 4:
            monkeypatch.setattr(owner[where], where, interrupted)
            assert engine.abort("r2")

    record = drive(engine, abort)
    assert record.finals["r2"].finish_reason == "abort"
    for request in requests:
        tokens = record.tokens[(request.request_id, 0)]
        assert tokens == expected_tokens(request, SPECS)[: len(tokens)]
        assert len(tokens) == 9 or request.request_id == "r2"
    assert_baseline(engine, runner)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 8])
def test_what_is_computed_again_is_counted_once(step: int) -> None:
    """A prompt that hits another one, three completions of one prompt, and one more."""
    engine, runner, _ = make(Letters(), run_ahead=False)
    with contextlib.suppress(KeyboardInterrupt):
        while engine.has_work():
            engine.step()
    before = engine.stats()
    hit = Request("hit", (*prompt_of(18, 3)[:16], 5, 6, 7), greedy(6))
    fork = Request("fork", prompt_of(14, 9), greedy(6, n=3))
    for request in (hit, fork):
        engine.add_request(request)

    def fail(now: int) -> None:
        if now == step:
            runner.launch_error = KeyboardInterrupt()

    record = drive(engine, fail)
    stats, usages = engine.stats(), {name: e.usage for name, e in record.finals.items()}
    assert stats.prompt_tokens - before.prompt_tokens == 19 + 3 * 14
    assert stats.cached_tokens - before.cached_tokens == 16 + 2 * 13
    assert usages["hit"].cached_tokens == 16  # type: ignore[union-attr]
    assert usages["fork"].cached_tokens == 0  # type: ignore[union-attr]
    reports = [record.ends[("fork", index)].cache for index in range(3)]
    assert [report and report.cached_tokens for report in reports] == [0, 13, 13]
    assert_baseline(engine, runner)


def test_an_interrupt_comes_at_the_end_of_the_block() -> None:
    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        for _ in range(2):
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                seen.append("inner")
            seen.append("outer")
    assert seen == ["inner", "outer"] * 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_error_in_the_block_stays_and_other_threads_have_no_interrupts() -> None:
    with pytest.raises(ZeroDivisionError), uninterrupted():
        raise ZeroDivisionError
    handlers = []

    def work() -> None:
        with uninterrupted():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
