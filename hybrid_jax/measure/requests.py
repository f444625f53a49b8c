"""Requests against the clock: what each of them took, and what that comes to."""

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request, StepRunner, TokenEvent
from hybrid_jax.fields import INT32_MAX, integer
from hybrid_jax.sampling_params import SamplingParams

PERCENTILES = (50, 90, 99)
Clock = Callable[[], float]  # seconds
Progress = Callable[[str], object]  # is told what is going on, a line at a time

at_least_one = integer(1, INT32_MAX, "use 1 or more")


def no_progress(line: str) -> None:
    """Tells nobody."""


def warming_up(batch: int) -> str:
    """What is going on before the first figure of a batch."""
    return f"{batch} at once: compiling, in a run that is not counted"


def check_batch(runner: StepRunner, batch: int) -> None:
    """Raises ValueError unless `batch` sequences can run at once."""
    at_least_one("batch", batch)
    if batch > runner.config.max_num_seqs:
        raise ValueError(
            f"batch {batch} is more than max_num_seqs {runner.config.max_num_seqs}; lower it or "
            "raise max_num_seqs"
        )


@dataclass
class RequestTimes:
    """One request, in seconds since it was sent."""

    ttft: float | None = None  # to the first token, or the first text
    gaps: list[float] = field(default_factory=list)  # between tokens, or pieces of text
    e2e: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Per output token after the first."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)


def percentiles(values: Iterable[float | None]) -> dict[str, float | None]:
    """p50, p90, p99 and the mean; None where there is no value."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return dict.fromkeys([*(f"p{p}" for p in PERCENTILES), "mean"])
    cuts: dict[str, float | None] = {
        f"p{p}": known[max(0, -(-len(known) * p // 100) - 1)] for p in PERCENTILES
    }
    return cuts | {"mean": statistics.fmean(known)}


def latencies(results: Sequence[RequestTimes]) -> dict[str, dict[str, float | None]]:
    """Percentiles of time to first token, per output token, between tokens and end to end."""
    return {
        "ttft_seconds": percentiles(r.ttft for r in results),
        "tpot_seconds": percentiles(r.tpot for r in results),
        "itl_seconds": percentiles(gap for r in results for gap in r.gaps),
        "e2e_seconds": percentiles(r.e2e for r in results),
    }


def random_requests(
    lengths: Sequence[tuple[int, int]], vocab_size: int, rng: random.Random
) -> list[Request]:
    """One greedy request per (prompt tokens, output tokens), of random tokens, never cut short."""
    return [
        Request(
            f"bench-{i}",
            tuple(rng.randrange(vocab_size) for _ in range(prompt)),
            SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False),
        )
        for i, (prompt, output) in enumerate(lengths)
    ]


def run_requests(
    engine: Engine,
    requests: Sequence[Request],
    concurrency: int,
    clock: Clock = time.perf_counter,
) -> tuple[list[RequestTimes], float]:
    """Runs requests, `concurrency` at any time. Their times, in order, and the seconds of all.

    Raises the error of a request that failed: figures without it would be of something else.
    """
    waiting, under_way = deque(requests), dict[str, _Watch]()
    times, began = [], clock()
    while waiting or under_way:
        while waiting and len(under_way) < concurrency:
            request = waiting.popleft()
            watch = _Watch(RequestTimes(prompt_tokens=len(request.prompt_token_ids)), clock())
            times.append(watch.times)
            under_way[request.request_id] = watch
            engine.add_request(request)
        events = engine.step()
        now = clock()
        for event in events:
            if event.error is not None:
                raise event.error
            under_way[event.request_id].see(event, now)
            if event.final:
                del under_way[event.request_id]
    return times, clock() - began


class _Watch:
    """The clock of one request."""

    def __init__(self, times: RequestTimes, sent: float) -> None:
        self.times = times
        self._sent = self._last = sent

    def see(self, event: TokenEvent, now: float) -> None:
        """Counts an event that came out at `now`."""
        times = self.times
        if event.new_token_ids:
            times.output_tokens += len(event.new_token_ids)
            if times.ttft is None:
                times.ttft = now - self._sent
            else:
                times.gaps.append(now - self._last)
            self._last = now
        times.e2e = now - self._sent
        if event.usage is not None:
            times.cached_tokens = event.usage.cached_tokens
