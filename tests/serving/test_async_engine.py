"""The engine thread: one final event per stream, prompt aborts, drain, and no silent death."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request, TokenEvent
from hybrid_jax.errors import EngineDead, InvalidRequest, QueueFull, StepFailed
from serving.async_engine import AsyncEngine, Observer, TokenStream
from serving.errors import ShuttingDown
from tests.helpers.engine_checks import (
    assert_baseline,
    expected_tokens,
    greedy,
    prompt_of,
    small_config,
)
from tests.helpers.fake_runner import FULL, STATE, FakeRunner, window
from tests.helpers.stalled_engine import StepGate, heard_abort

SPECS = (FULL, window(6), STATE)
DEADLINE = 20.0  # seconds; only a broken engine takes so long


def request(name: str, length: int = 5, max_tokens: int = 9, **options: Any) -> Request:
    return Request(name, prompt_of(length, len(name)), greedy(max_tokens, **options))


@asynccontextmanager
async def running(
    observers: tuple[Observer, ...] = (), **options: Any
) -> AsyncIterator[tuple[AsyncEngine, Engine, FakeRunner]]:
    """A started engine that must be at baseline at the end."""
    runner = FakeRunner(SPECS, (40, 30, 4), small_config(**options))
    engine = Engine(runner, None)
    served = AsyncEngine(engine, None, observers=observers)
    served.start()
    try:
        yield served, engine, runner
    finally:
        await asyncio.to_thread(served.close)
    assert_baseline(engine, runner)


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE))  # type: ignore[arg-type]


async def idle(engine: Engine) -> None:
    while engine.has_work():
        await asyncio.sleep(0.001)


def test_streams_give_the_tokens_of_the_oracle_and_one_final_event() -> None:
    async def test() -> None:
        async with running() as (served, _, _):
            requests = [request(f"r{i}", 3 + i, 4 + i) for i in range(7)]
            streams = [served.generate(r, whole=i % 2 == 0) for i, r in enumerate(requests)]
            for r, stream in zip(requests, streams, strict=True):
                events = [event async for event in stream]
                tokens = [t for event in events for t in event.new_token_ids]
                assert tokens == expected_tokens(r, SPECS)
                assert [e.final for e in events] == [False] * (len(events) - 1) + [True]
                assert [e async for e in stream] == []  # ended for good

    in_loop(test)


def test_collect_gives_all_completions_and_the_usage() -> None:
    async def test() -> None:
        async with running() as (served, _, _):
            wanted = request("a", 6, 5, n=3, temperature=1.0, seed=4)
            output = await served.generate(wanted, whole=True).collect()
            assert [c.index for c in output.outputs] == [0, 1, 2]
            for k, completion in enumerate(output.outputs):
                assert completion.token_ids == expected_tokens(wanted, SPECS, seed=4 + k)
            assert output.usage is not None
            assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (6, 15)

    in_loop(test)


@pytest.mark.parametrize("when", ["before the first step", "after a token"])
def test_closing_a_stream_aborts_its_request_and_no_other(when: str) -> None:
    async def test() -> None:
        async with running() as (served, engine, _):
            kept = request("kept", 4, 20)
            with served.generate(kept) as stream:
                with served.generate(request("gone", 5, 50)) as gone:
                    if when == "after a token":
                        await anext(gone)
                output = await stream.collect()
            assert output.outputs[0].token_ids == expected_tokens(kept, SPECS)
            await idle(engine)
            assert engine.stats().running == 0

    in_loop(test)


def test_a_stream_closed_late_spares_a_later_request_with_its_id() -> None:
    async def test() -> None:
        async with running() as (served, engine, _):
            early = served.generate(request("a", 4, 3))
            await anext(early)
            await idle(engine)  # its last events wait to be read
            while True:
                try:
                    late = served.generate(request("a", 5, 20))
                    break
                except InvalidRequest:  # the last event is on its way
                    await asyncio.sleep(0)
            early.close()
            output = await late.collect()
            assert output.outputs[0].token_ids == expected_tokens(request("a", 5, 20), SPECS)

    in_loop(test)


def test_a_cancelled_reader_aborts_its_request() -> None:
    async def test() -> None:
        async with running() as (served, engine, runner):
            gate = StepGate(runner)

            async def read() -> None:
                with served.generate(request("a", 4, 50)) as stream:
                    await stream.collect()

            task = asyncio.create_task(read())
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            await idle(engine)

    in_loop(test)


def test_an_abort_by_id_ends_the_stream_with_a_final_event() -> None:
    async def test() -> None:
        async with running() as (served, _, runner):
            gate = StepGate(runner, free=3)  # enough for a token, too few for all
            stream = served.generate(request("a", 4, 55))
            await anext(stream)
            assert served.abort("a") and not served.abort("b")
            gate.open()
            assert [e async for e in stream][-1].finish_reason == "abort"
            assert not served.abort("a")

    in_loop(test)


def test_what_cannot_be_served_is_refused_at_once() -> None:
    async def test() -> None:
        async with running(max_queue=1) as (served, _, runner):
            gate = StepGate(runner)
            with pytest.raises(InvalidRequest, match="max_model_len"):
                served.generate(request("long", 64))
            first = served.generate(request("a"))
            with pytest.raises(InvalidRequest, match="in use"):
                served.generate(request("a"))
            second = served.generate(request("b")) if not served.stats().waiting else None
            with pytest.raises(QueueFull):
                served.generate(request("c"))
            gate.open()
            for stream in (first, second):
                if stream is not None:
                    assert (await stream.collect()).outputs[0].finish_reason == "length"

    in_loop(test)


def test_a_failed_step_ends_its_requests_and_the_next_ones_are_served() -> None:
    async def test() -> None:
        async with running() as (served, _, runner):
            runner.launch_error = MemoryError("out of memory on the device")
            failed = await served.generate(request("a")).collect()
            assert isinstance(failed.outputs[0].error, StepFailed)
            good = request("b")
            output = await served.generate(good).collect()
            assert output.outputs[0].token_ids == expected_tokens(good, SPECS)
            assert served.accepting

    in_loop(test)


def test_an_engine_that_cannot_recover_ends_every_stream_and_says_so() -> None:
    async def test() -> None:
        async with running() as (served, _, runner):
            runner.launch_error = RuntimeError("device lost")
            runner.reset_error = RuntimeError("still lost")
            streams = [served.generate(request(f"r{i}")) for i in range(5)]
            outputs = [await stream.collect() for stream in streams]
            assert {o.outputs[0].finish_reason for o in outputs} == {"error"}
            while served.accepting:
                await asyncio.sleep(0.001)
            assert isinstance(served.death, EngineDead)
            with pytest.raises(EngineDead, match="still lost"):
                served.generate(request("late"))

    in_loop(test)


def test_a_bug_outside_the_step_ends_every_stream_too() -> None:
    async def test() -> None:
        runner = FakeRunner(SPECS, (40, 30, 4), small_config())
        engine = Engine(runner, None)
        calls = 0

        def broken() -> list[TokenEvent]:
            nonlocal calls
            calls += 1
            raise KeyError("bug")

        engine.step = broken  # type: ignore[method-assign]
        served = AsyncEngine(engine, None)
        served.start()
        stream = served.generate(request("a"))
        with pytest.raises(EngineDead, match="KeyError"):
            await stream.collect()
        assert calls == 3 and not served.accepting
        await asyncio.to_thread(served.close)

    in_loop(test)


def test_drain_lets_requests_finish_and_accepts_no_more() -> None:
    async def test() -> None:
        async with running() as (served, _, _):
            accepted = request("a", 4, 40)
            stream = served.generate(accepted)
            draining = asyncio.create_task(served.drain(DEADLINE))
            await asyncio.sleep(0)
            with pytest.raises(ShuttingDown):
                served.generate(request("b"))
            assert (await stream.collect()).outputs[0].token_ids == expected_tokens(accepted, SPECS)
            await draining

    in_loop(test)


def test_drain_aborts_what_does_not_end_in_time() -> None:
    async def test() -> None:
        async with running() as (served, _, runner):
            gate = StepGate(runner)
            stream = served.generate(request("a", 4, 50))
            with heard_abort(served) as told:
                draining = asyncio.create_task(served.drain(0.05))
                await asyncio.to_thread(told.wait, DEADLINE)
            gate.open()
            events = [e async for e in stream]
            assert events[-1].final and events[-1].finish_reason == "abort"
            await draining

    in_loop(test)


def test_close_gives_open_streams_their_final_event() -> None:
    async def test() -> None:
        async with running() as (served, _, _):
            stream = served.generate(request("a", 4, 55))
            await anext(stream)
            await asyncio.to_thread(served.close)
            assert [e async for e in stream][-1].finish_reason in ("abort", "length")

    in_loop(test)


def test_a_step_that_hangs_shows_and_an_idle_engine_does_not() -> None:
    async def test() -> None:
        async with running() as (served, engine, runner):
            await asyncio.sleep(0.05)
            assert served.stalled_seconds() == 0.0
            gate = StepGate(runner)
            stream = served.generate(request("a"))
            while served.stalled_seconds() <= 0.05:
                await asyncio.sleep(0.01)
            gate.open()
            await stream.collect()
            await idle(engine)
            await asyncio.sleep(0.05)
            assert served.stalled_seconds() == 0.0

    in_loop(test)


def test_observers_see_every_event_with_the_times_of_the_one_before() -> None:
    seen: list[tuple[str, bool, float | None, float]] = []

    def observe(stream: TokenStream, event: TokenEvent, now: float) -> None:
        last = stream.last_token_at.get(event.index)
        seen.append((event.request_id, event.final, last, now))

    async def test() -> None:
        async with running((observe,)) as (served, _, _):
            began = time.monotonic()
            await served.generate(request("a", 4, 6), whole=True).collect()
            assert [final for _, final, _, _ in seen] == [False] * 5 + [True]
            assert seen[0][2] is None and seen[0][3] >= began
            assert [last for _, _, last, _ in seen[1:]] == [now for _, _, _, now in seen[:-1]]

    in_loop(test)


def test_two_loops_share_one_engine() -> None:
    async def test() -> None:
        async with running() as (served, _, _):
            mine, other = request("mine", 4, 30), request("other", 7, 30)

            async def read(wanted: Request) -> list[int]:
                return (await served.generate(wanted).collect()).outputs[0].token_ids

            elsewhere = asyncio.to_thread(lambda: asyncio.run(read(other)))
            tokens = await asyncio.gather(read(mine), elsewhere)
            assert tokens == [expected_tokens(mine, SPECS), expected_tokens(other, SPECS)]

    in_loop(test)
