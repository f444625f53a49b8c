"""Notices when the engine makes no progress, and writes down where every thread stands."""

import faulthandler
import logging
import tempfile
import threading

from serving.async_engine import AsyncEngine

logger = logging.getLogger(__name__)


class Watchdog:
    """Says whether the engine is alive; a thread looks after it even when every loop is stuck."""

    def __init__(self, engine: AsyncEngine, *, stall_seconds: float) -> None:
        """A step that takes longer than `stall_seconds` is a stall."""
        self._engine = engine
        self._limit = stall_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Starts to look."""
        self._thread.start()

    def stop(self) -> None:
        """Looks no more. Idempotent."""
        self._stop.set()

    def problem(self) -> str | None:
        """Why the engine is not healthy, for people; None if it is."""
        if self._engine.death is not None:
            return str(self._engine.death)
        stalled = self._engine.stalled_seconds()
        if stalled > self._limit:
            return f"no step has completed for {stalled:.0f} s although requests wait"
        return None

    def _watch(self) -> None:
        reported = False
        while not self._stop.wait(min(1.0, self._limit / 4)):
            problem = self.problem()
            if problem and not reported:
                logger.critical("%s", problem, extra={"stacks": _stacks()})
            elif reported and not problem:
                logger.warning("the engine makes progress again")
            reported = problem is not None


def _stacks() -> list[str]:
    with tempfile.TemporaryFile("w+") as file:  # faulthandler writes to file descriptors only
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().splitlines()
