"""Where the time of steps goes."""

import time
from typing import Literal

Phase = Literal["launch", "wait", "output"]


class StepClock:
    """Seconds spent per phase of all steps so far.

    launch: scheduling, building the batch and starting the step. wait: until the results of a step
    are on the host, which is the device's time as far as nothing hides it. output: stop conditions
    and text.
    """

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = {"launch": 0.0, "wait": 0.0, "output": 0.0}
        self._last = 0.0

    def start(self) -> None:
        """A phase begins."""
        self._last = time.perf_counter()

    def lap(self, phase: Phase) -> None:
        """A phase has ended, and the next one begins."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now
