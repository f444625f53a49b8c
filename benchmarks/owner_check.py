"""What the owner check of state rows costs a decode step, compared with a step without it.

    python benchmarks/owner_check.py [--model PATH] [--rows 16] [--pairs 400]

Two engines of the same model decode the same requests in one process, a step of the one and then a
step of the other, in turns. The second one's steps were traced while the check was replaced by one
that is always content; there is no such option. The figure is the median of the paired differences,
with 90 % of its bootstrap beside it; pairs, since neighbours see the same load of the machine.
"""

import argparse
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.bundled import bundled_model
from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.loading import LoadedModel
from hybrid_jax.runtime.batch import StepBatch
from hybrid_jax.runtime.runner import Runner, open_model
from hybrid_jax.sampling_params import SamplingParams


def no_check(
    owners: Sequence[jax.Array], batch: StepBatch
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Instead of `runtime.step.check_owners`: compares and writes nothing."""
    return jnp.ones(batch.seq_lens.shape, jnp.bool_), tuple(owners)


def decoding_engine(model: LoadedModel, rows: int, steps: int) -> Engine:
    """An engine whose next `steps` steps decode `rows` rows; compiled."""
    length = min(model.config.max_position, steps + 64)
    config = EngineConfig(
        max_num_seqs=rows,
        max_model_len=length,
        max_num_batched_tokens=4 * rows,
        row_buckets=(rows,),
        token_buckets=(4 * rows,),
        run_ahead=False,
    )
    engine = Engine(Runner(model, config), None)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    for i in range(rows):
        engine.add_request(Request(f"r{i}", (5, 6, 7 + i), params))
    for _ in range(8):  # prefill and compilation
        engine.step()
    return engine


def timed_step(engine: Engine) -> float:
    """Milliseconds of one step, its results included."""
    start = time.perf_counter()
    engine.step()
    return (time.perf_counter() - start) * 1e3


def measure(path: Path, rows: int, pairs: int) -> None:
    """Prints the medians and the paired difference in milliseconds."""
    model = open_model(path, dtype="auto", config=EngineConfig())
    checked = decoding_engine(model, rows, pairs + 16)
    with mock.patch("hybrid_jax.runtime.step.check_owners", no_check):
        unchecked = decoding_engine(model, rows, pairs + 16)
    times = np.empty((pairs, 2))
    for i in range(pairs):
        # Who goes first changes: the second finds warmer caches.
        for j in (0, 1) if i % 2 else (1, 0):
            times[i, j] = timed_step((checked, unchecked)[j])
    difference = times[:, 0] - times[:, 1]
    draws = np.random.default_rng(0).choice(difference, (1000, pairs))
    low, high = np.quantile(np.median(draws, axis=1), (0.05, 0.95))
    with_check, without = np.median(times, axis=0)
    print(f"{path.name}: {rows} rows, {pairs} pairs, {platform.processor() or platform.machine()}")
    print(f"with the check {with_check:.3f} ms, without {without:.3f} ms per step")
    print(
        f"the check costs {np.median(difference):.4f} ms (90 % of medians: {low:.4f} to "
        f"{high:.4f}), {np.median(difference) / without:.2%} of a step"
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=bundled_model())
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=400)
    args = parser.parse_args()
    measure(args.model, args.rows, args.pairs)


if __name__ == "__main__":
    main()
