"""The host's share of a decode step: schedule, build, dispatch and finish.

    python benchmarks/host_time.py [--model PATH] [--rows 16] [--steps 300]

The engine runs ahead as it always does; what is left out of the time inside `Engine.step` is the
wait for the device, taken where the previous step's tokens are about to be read.
"""

import argparse
import platform
import time
from pathlib import Path

import jax
import numpy as np

from hybrid_jax.bundled import bundled_model
from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.runtime.runner import Runner, open_model
from hybrid_jax.sampling_params import SamplingParams


class TimedRunner(Runner):
    """Keeps the time that dispatching took."""

    def step(self, batch, sampling):
        """As `Runner.step`."""
        start = time.perf_counter()
        output = super().step(batch, sampling)
        self.dispatch = time.perf_counter() - start
        return output


class TimedEngine(Engine):
    """Keeps the time spent waiting for the device."""

    def _finish(self, steps):
        start = time.perf_counter()
        jax.block_until_ready([step.output for step in steps])
        self.wait = time.perf_counter() - start
        super()._finish(steps)


def measure(model: Path, rows: int, steps: int) -> None:
    """Prints medians in milliseconds."""
    config = EngineConfig(
        max_num_seqs=rows, max_model_len=min(2048, steps + 64), row_buckets=(rows,)
    )
    runner = TimedRunner(open_model(model, dtype="auto", config=config), config)
    engine = TimedEngine(runner, None)
    params = SamplingParams(
        temperature=0.0, max_tokens=steps + 8, ignore_eos=True, detokenize=False
    )
    for i in range(rows):
        engine.add_request(Request(f"r{i}", (5, 6, 7 + i), params, None))
    for _ in range(8):  # prefill, compilation
        engine.step()
    totals, cpus, dispatches = [], [], []
    for _ in range(steps - 16):
        start, cpu = time.perf_counter(), time.thread_time()
        engine.step()
        totals.append(time.perf_counter() - start - engine.wait)
        cpus.append(time.thread_time() - cpu)
        dispatches.append(runner.dispatch)
    engine.close()
    total, dispatch = np.median(totals) * 1e3, np.median(dispatches) * 1e3
    print(f"{model.name}: {rows} rows, {platform.processor() or platform.machine()}")
    print(f"jax {jax.__version__}, Python {platform.python_version()}, {steps - 16} steps")
    print(f"host time per step: {total:.3f} ms, of which dispatch {dispatch:.3f} ms")
    print(f"CPU time of the host thread: {np.median(cpus) * 1e3:.3f} ms")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=bundled_model())
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    measure(args.model, args.rows, args.steps)


if __name__ == "__main__":
    main()
