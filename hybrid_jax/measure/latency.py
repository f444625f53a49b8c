"""How long requests take that are sent at once: TTFT, TPOT and the gaps between tokens."""

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import StepRunner
from hybrid_jax.measure.requests import (
    Clock,
    Progress,
    RequestTimes,
    at_least_one,
    check_batch,
    latencies,
    no_progress,
    random_requests,
    run_requests,
    warming_up,
)


@dataclass(frozen=True)
class Latency:
    """`rounds` rounds of `batch` requests that start together. One round before is not counted."""

    batch: int
    prompt_tokens: int  # of each request
    output_tokens: int
    rounds: int
    requests: tuple[RequestTimes, ...]

    def to_dict(self) -> dict[str, Any]:
        """Percentiles over the requests of all rounds, for JSON."""
        numbers = asdict(self) | latencies(self.requests)
        numbers["cached_tokens"] = sum(request.cached_tokens for request in self.requests)
        del numbers["requests"]
        return numbers


def measure_latency(
    runner: StepRunner,
    batches: Sequence[int] = (1,),
    *,
    prompt_tokens: int = 128,
    output_tokens: int = 64,
    rounds: int = 5,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    progress: Progress = no_progress,
) -> tuple[Latency, ...]:
    """One `Latency` per batch size, each on a fresh engine. Prompts are random and all different.

    Raises:
        ValueError: a number is below 1, or the runner has no room for a batch at once.
        InvalidRequest: prompt and output are longer than `max_model_len`.
    """
    shape = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "rounds": rounds}
    for name, value in shape.items():
        at_least_one(name, value)
    rng, results = random.Random(f"latency {seed}"), []
    for batch in batches:
        check_batch(runner, batch)
        engine, times = Engine(runner, None), list[RequestTimes]()
        progress(warming_up(batch))
        for counts in (False, *[True] * rounds):
            lengths = [(prompt_tokens, output_tokens)] * batch
            requests = random_requests(lengths, runner.model_config.vocab_size, rng)
            seen, _ = run_requests(engine, requests, batch, clock)
            times += seen if counts else []
        results.append(Latency(batch, prompt_tokens, output_tokens, rounds, tuple(times)))
    return tuple(results)
