"""Tokens per second of a queue of requests, and what they take: steps, host time, memory."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.step_clock import Phase
from hybrid_jax.engine.types import StepRunner
from hybrid_jax.measure.requests import (
    Clock,
    Progress,
    at_least_one,
    check_batch,
    no_progress,
    random_requests,
    run_requests,
    warming_up,
)

Range = tuple[int, int]  # of tokens, both ends included


@dataclass(frozen=True)
class Throughput:
    """Requests that are all there from the start, `batch` of them running at any time."""

    batch: int
    requests: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # of the prompts, not computed
    steps: int
    preemptions: int
    phase_seconds: dict[Phase, float]  # of all steps, see `StepClock`
    peak_bytes: dict[str, int]  # by cache class, of the pages and slots in use at once

    @property
    def prompt_tokens_per_second(self) -> float:
        """Of the whole run, in which prompts and outputs overlap."""
        return self.prompt_tokens / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        """Of the whole run."""
        return self.output_tokens / self.seconds

    @property
    def host_seconds_per_step(self) -> float:
        """Scheduling, building and launching, stop conditions: all but the wait for the device."""
        return (self.phase_seconds["launch"] + self.phase_seconds["output"]) / self.steps

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        names = ("prompt_tokens_per_second", "output_tokens_per_second", "host_seconds_per_step")
        return vars(self) | {name: getattr(self, name) for name in names}


def measure_throughput(
    runner: StepRunner,
    batches: Sequence[int] = (1,),
    *,
    requests: int = 32,
    prompt_tokens: Range = (32, 128),
    output_tokens: Range = (16, 64),
    seed: int = 0,
    clock: Clock = time.perf_counter,
    progress: Progress = no_progress,
) -> tuple[Throughput, ...]:
    """One `Throughput` per batch size, each on a fresh engine.

    All batch sizes get the same requests, of random tokens and lengths. They have run once before
    they are timed, with other tokens.

    Raises:
        ValueError: a number is below 1, a range is empty, or the runner has no room for a batch.
        InvalidRequest: prompt and output are longer than `max_model_len`.
    """
    at_least_one("requests", requests)
    for name, (low, high) in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if not 1 <= low <= high:
            raise ValueError(f"{name} must be 1 <= lowest <= highest, got {low} to {high}")
    rng = random.Random(f"lengths {seed}")
    lengths = [(rng.randint(*prompt_tokens), rng.randint(*output_tokens)) for _ in range(requests)]
    vocab, results = runner.model_config.vocab_size, []
    for batch in batches:
        check_batch(runner, batch)
        warm_up, timed = (
            random_requests(lengths, vocab, random.Random(f"{name} {seed}"))
            for name in ("warm-up", "timed")
        )
        engine = Engine(runner, None)
        progress(warming_up(batch))
        run_requests(engine, warm_up, batch, clock)
        engine = Engine(runner, None)
        times, seconds = run_requests(engine, timed, batch, clock)
        stats, memory = engine.stats(), engine.memory()
        results.append(
            Throughput(
                batch=batch,
                requests=requests,
                seconds=seconds,
                prompt_tokens=sum(t.prompt_tokens for t in times),
                output_tokens=sum(t.output_tokens for t in times),
                cached_tokens=sum(t.cached_tokens for t in times),
                steps=stats.steps,
                preemptions=stats.preemptions,
                phase_seconds=dict(stats.phase_seconds),
                peak_bytes={pool.name: pool.peak * pool.unit_bytes for pool in memory.pools},
            )
        )
    return tuple(results)
