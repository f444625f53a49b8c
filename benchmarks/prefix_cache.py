"""What the prefix cache gives and costs: time to the first token, and throughput without reuse.

    python benchmarks/prefix_cache.py [--model PATH] [--shared 512 1024] [--repeats 5] [--rounds 20]

Hit and miss alternate on one warm engine; throughput is of the same requests with the cache on and
off, in pairs.
"""

import argparse
import platform
import random
import statistics
import time
from pathlib import Path

import jax
import numpy as np

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.bundled import bundled_model

TAIL = 24  # tokens of the user's text, other in every request
NEW = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and the prompt tokens that were found in the caches."""
    start = time.perf_counter()
    output = llm.generate([prompt], NEW, use_tqdm=False)[0]
    seconds = time.perf_counter() - start
    report = output.outputs[0].cache
    assert report is not None, output.outputs[0].error
    return seconds, report.cached_tokens


def hit_and_miss(llm: LLM, shared: int, repeats: int, rng: random.Random) -> None:
    """Prints a line of the table."""
    misses, hits, found = [], [], 0
    for i in range(repeats + 1):  # the first round compiles
        system = tokens(rng, shared)
        miss, cached = first_token(llm, system + tokens(rng, TAIL))
        assert cached < 64, "a miss found something"
        first_token(llm, system + tokens(rng, TAIL))  # leaves a state where the two diverge
        hit, found = first_token(llm, system + tokens(rng, TAIL))
        if i:
            misses.append(miss)
            hits.append(hit)
    miss, hit = statistics.median(misses), statistics.median(hits)
    print(f"{shared:6} {found:7} {miss * 1e3:9.1f} {hit * 1e3:9.1f} {miss / hit:7.1f}")


def without_reuse(llms: dict[str, LLM], rounds: int, rng: random.Random) -> None:
    """Prints tokens per second of prompts that share nothing, and the ratio of each round.

    Both engines run a round's prompts, who goes first changes. The median of the rounds' ratios has
    90 % of its bootstrap beside it.
    """
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
    rates = {name: np.empty(rounds + 1) for name in llms}
    for i in range(rounds + 1):  # the first round compiles
        prompts = [tokens(rng, 150 + 10 * k) for k in range(16)]
        for name, llm in llms.items() if i % 2 else reversed(llms.items()):
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            rates[name][i] = 16 * 64 / (time.perf_counter() - start)
    for name, values in rates.items():
        print(f"cache {name}: {np.median(values[1:]):.0f} tokens/s")
    ratios = (rates["on"] / rates["off"])[1:]
    draws = np.random.default_rng(0).choice(ratios, (1000, rounds))
    low, high = np.quantile(np.median(draws, axis=1), (0.05, 0.95))
    print(f"on / off: {np.median(ratios):.3f} ({low:.3f} to {high:.3f}), {rounds} rounds")


def tokens(rng: random.Random, count: int) -> list[int]:
    """Token ids that no two prompts share."""
    return [rng.randrange(10, 1000) for _ in range(count)]


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=bundled_model())
    parser.add_argument("--shared", type=int, nargs="+", default=[512, 1024, 1900])
    parser.add_argument("--repeats", type=int, default=5, help="prompts for the first token")
    parser.add_argument("--rounds", type=int, default=20, help="pairs without reuse; 0: none")
    args = parser.parse_args()
    rng, longest = random.Random(0), max(args.shared) + TAIL + 8
    options = {
        "max_num_seqs": 8,
        "max_model_len": max(longest, 400),
        "max_num_batched_tokens": 512,
        "row_buckets": (8,),
        "token_buckets": (32, 128, 512),
    }
    llms = {
        name: LLM(args.model, prefix_cache=on, **options)
        for name, on in (("on", True), ("off", False))
    }
    print(f"{args.model.name}, {platform.processor() or platform.machine()}, jax {jax.__version__}")
    print("shared   found   miss ms    hit ms   ratio")
    for shared in args.shared:
        hit_and_miss(llms["on"], shared, args.repeats, rng)
    if args.rounds:
        without_reuse(llms, args.rounds, rng)


if __name__ == "__main__":
    main()
