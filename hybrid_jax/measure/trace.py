"""What ran on the device and for how long, from the traces that `jax.profiler` writes."""

import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
from jax.profiler import ProfileData, ProfileOptions

from hybrid_jax.errors import HybridJaxError


class Event(NamedTuple):
    """One run of one HLO instruction, in seconds since the trace began."""

    thread: str  # or stream: events of one thread nest
    module: str
    instruction: str
    run: int  # of the module
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """The device's time over some runs of one module, and what other modules took meanwhile."""

    runs: int
    self_seconds: dict[str, float]  # by instruction, without what was called meanwhile
    other_seconds: float  # of other modules
    wall: float  # from the first instruction to the last
    busy: float  # of it, with any instruction running
    gap: float  # of it, between the end of a run and the start of the next

    @property
    def total(self) -> float:
        """All self times; more than `busy` where instructions run side by side."""
        return sum(self.self_seconds.values()) + self.other_seconds


def record(run: Callable[[], None]) -> list[Event]:
    """Traces `run` without its Python calls, which would slow it down.

    Raises:
        RuntimeError: another trace is being taken in this process.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            run()
        (path,) = Path(directory).rglob("*.xplane.pb")
        with warnings.catch_warnings():
            # Types of jaxlib warn on new Pythons, which aborts where warnings are errors.
            warnings.simplefilter("ignore", DeprecationWarning)
            return _read(path)


def _read(path: Path) -> list[Event]:
    """All that name an HLO instruction and a run: of the devices, or else of the host's threads."""
    data = ProfileData.from_file(str(path))  # owns all below
    device, host = list[Event](), list[Event]()
    for plane in data.planes:
        found = device if plane.name.startswith("/device:") else host
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats and "run_id" in stats:
                    found.append(
                        Event(
                            f"{plane.name}{line.name}",
                            str(stats.get("hlo_module", "")),
                            str(stats["hlo_op"]),
                            int(stats["run_id"]),
                            1e-9 * event.start_ns,
                            1e-9 * (event.start_ns + event.duration_ns),
                        )
                    )
    return device or host


def summarise(events: Iterable[Event], module: str, *, last: int = 0) -> Trace:
    """Adds up the runs of `module`.

    Args:
        events: of a trace.
        module: the HLO module's name, such as "jit_step".
        last: only the last so many runs count; 0: all of them. The trace may begin within one.

    Raises:
        HybridJaxError: there are no runs of the module.
    """
    events = list(events)
    begins: dict[int, float] = {}
    for event in events:
        if event.module == module:
            begins[event.run] = min(event.start, begins.get(event.run, event.start))
    order = sorted(begins, key=begins.__getitem__)[-last:]
    if not order:
        raise HybridJaxError(
            f"the trace names no HLO operations and runs of {module} on "
            f"{jax.devices()[0].device_kind}; profile on another device"
        )
    first = begins[order[0]]
    counted = [e for e in events if e.start >= first and (e.module != module or e.run in order)]
    self_seconds: dict[str, float] = defaultdict(float)
    other = 0.0
    for event, seconds in self_times(counted):
        if event.module == module:
            self_seconds[event.instruction] += seconds
        else:
            other += seconds
    end = max(e.end for e in counted if e.module == module)
    return Trace(
        len(order),
        dict(self_seconds),
        other,
        end - first,
        _covered(counted, first, end),
        _gaps(counted, module),
    )


def self_times(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Every event with its own seconds: its duration less that of the events inside it.

    Loops and conditionals contain what they run, on the same thread.
    """
    threads: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        threads[event.thread].append(event)
    for found in threads.values():
        found.sort(key=lambda event: (event.start, -event.end))
        inside = [0.0] * len(found)  # seconds of the events directly inside each
        stack: list[int] = []
        for i, event in enumerate(found):
            while stack and found[stack[-1]].end <= event.start:
                stack.pop()
            if stack:
                inside[stack[-1]] += event.end - event.start
            stack.append(i)
        for event, seconds in zip(found, inside, strict=True):
            yield event, max(0.0, event.end - event.start - seconds)


def _covered(events: Iterable[Event], first: float, last: float) -> float:
    """Seconds of [first, last] in which at least one event is under way."""
    covered, end = 0.0, first
    for event in sorted(events, key=lambda event: event.start):
        covered += max(0.0, min(event.end, last) - max(event.start, end))
        end = max(end, event.end)
    return covered


def _gaps(events: Iterable[Event], module: str) -> float:
    """Seconds between the end of each run and the start of the next."""
    spans: dict[int, tuple[float, float]] = {}
    for event in events:
        if event.module == module:
            start, end = spans.get(event.run, (event.start, event.end))
            spans[event.run] = min(start, event.start), max(end, event.end)
    ordered = sorted(spans.values())
    pairs = zip(ordered, ordered[1:], strict=False)
    return sum(max(0.0, after[0] - before[1]) for before, after in pairs)
