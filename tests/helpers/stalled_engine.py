"""Engines whose steps wait until they are released, and which say what has reached them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hybrid_jax.engine.engine import Engine
from serving.async_engine import AsyncEngine
from tests.helpers.engine_checks import assert_baseline, small_config
from tests.helpers.fake_runner import FULL, STATE, FakeRunner

DEADLINE = 30.0  # seconds; only a broken test takes so long


class StepGate:
    """Holds up a runner's steps, except the first `free` ones, until it is opened for good."""

    def __init__(self, runner: Any, free: int = 0) -> None:
        self._free = free
        self._open = threading.Event()
        self._runner, self._step = runner, runner.step
        runner.step = self._wait

    def _wait(self, *args: Any) -> Any:
        self._free -= 1
        assert self._free >= 0 or self._open.wait(DEADLINE)
        return self._step(*args)

    def open(self) -> None:
        """Lets all steps through."""
        self._runner.step = self._step
        self._open.set()


@contextmanager
def heard_abort(served: AsyncEngine) -> Iterator[threading.Event]:
    """Set once the engine has been told to abort a request, by whomever."""
    told, abort = threading.Event(), served.abort

    def hear(request_id: str) -> bool:
        known = abort(request_id)
        told.set()
        return known

    served.abort = hear  # type: ignore[method-assign]
    try:
        yield told
    finally:
        served.abort = abort  # type: ignore[method-assign]


@contextmanager
def stalled_engine(**options: Any) -> Iterator[tuple[AsyncEngine, Callable[[], None]]]:
    """A started engine and what releases its steps; it must be at baseline at the end."""
    runner = FakeRunner((FULL, STATE), (40, 4), small_config(**options))
    engine = Engine(runner, None)
    gate = StepGate(runner)
    served = AsyncEngine(engine, None)
    served.start()
    try:
        yield served, gate.open
    finally:
        gate.open()
        served.close()
    assert_baseline(engine, runner)
