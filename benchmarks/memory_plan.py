"""Concurrency and tokens/s at a fixed number of cache bytes: the plan against other formulas.

    python benchmarks/memory_plan.py [--shapes qwen3.5 gemma-3 olmo-hybrid] [--rounds 3]

Models have the layer patterns and the proportions of real ones (bytes of a state to bytes of a
token's K and V; window to context) at a size that a CPU can run, with random weights. The bytes are
those of `LEAST` sequences by the largest-layer formula. Each formula then runs as many sequences as
it has room for, over the same requests, in turns; output tokens per second include the prompts.
`nemotron-3-nano` is planned at its full size and not run: its Mamba-2 layers are given by what they
remember.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hybrid_jax.cache.plan import Placement, model_groups
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.loading import LoadedModel
from hybrid_jax.memory.formulas import largest_layer_bytes, unified_bytes
from hybrid_jax.memory.plan import sequences_that_fit
from hybrid_jax.models import config_from_hf
from hybrid_jax.models.decoder import abstract_params
from hybrid_jax.runtime.runner import Runner
from hybrid_jax.sampling_params import SamplingParams
from hybrid_jax.specs import CacheGroup, PagedSpec, StateArray, StateSpec

CONTEXT, NEW_TOKENS, LEAST = 1024, 128, 8
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
_SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
_STATES = {  # 64 KiB of state beside 128 bytes of K and V per token: 512 tokens, as in Qwen3.5
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5": _SIZES
    | _STATES
    | {"model_type": "qwen3_5_text", "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 3},
    # A window of an eighth of the context, five of them to a full layer.
    "gemma-3": _SIZES
    | {
        "model_type": "gemma3_text",
        "layer_types": ([SLIDING] * 5 + [FULL]) * 2,
        "sliding_window": CONTEXT // 8,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    # One attention layer in six, nearest to Nemotron's pattern among the mixers that run here.
    "olmo-hybrid": _SIZES
    | _STATES
    | {
        "model_type": "olmo_hybrid",
        "layer_types": ([LINEAR] * 5 + [FULL]) * 2,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
# 23 Mamba-2 layers (64 heads of 64 x 128 in float32; 3 inputs of 6,144 channels), 6 of attention.
NEMOTRON = (
    CacheGroup(
        StateSpec(
            (
                StateArray("conv", (3, 6144), "bfloat16"),
                StateArray("recurrent", (64, 64, 128), "float32"),
            )
        ),
        tuple(range(23)),
    ),
    CacheGroup(PagedSpec(2, 128, "bfloat16"), tuple(range(23, 29))),
)


def random_model(config: ModelConfig) -> LoadedModel:
    """Weights from a seeded normal distribution, in bfloat16."""
    graph, shapes, _ = abstract_params(config, "bfloat16")
    rng = np.random.default_rng(0)
    params = {
        path: jax.device_put((0.02 * rng.standard_normal(s.shape)).astype(s.dtype))
        for path, s in shapes.items()
    }
    return LoadedModel(config, graph, params, "bfloat16", Path(), ())


def concurrency(
    groups: tuple[CacheGroup, ...], config: EngineConfig, platform: str, context: int, least: int
) -> tuple[int, dict[str, int]]:
    """Cache bytes of `least` sequences by the largest layer, and what each formula runs in them."""
    placement = Placement(platform)
    largest = largest_layer_bytes(groups, config, placement, context)
    budget = least * largest
    return budget, {
        "layer by layer": sequences_that_fit(groups, config, placement, budget, context),
        "unified pages": budget // unified_bytes(groups, config, placement, context),
        "largest layer": budget // largest,
    }


def throughput(model: LoadedModel, sequences: int, budget: int, requests: int, seed: int) -> float:
    """Output tokens per second of `requests` requests of CONTEXT tokens, `sequences` at a time."""
    config = EngineConfig(
        max_num_seqs=sequences,
        max_model_len=CONTEXT,
        max_num_batched_tokens=512,
        cache_bytes=budget,
        prefix_cache=False,
        row_buckets=(sequences,),
        token_buckets=(512,),
        warmup=True,
    )
    engine = Engine(Runner(model, config), None)
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for i in range(requests):
        prompt = rng.integers(2, model.config.vocab_size, CONTEXT - NEW_TOKENS)
        engine.add_request(Request(f"r{i}", tuple(map(int, prompt)), params))
    start, tokens = time.perf_counter(), 0
    while engine.has_work():
        for event in engine.step():
            if event.error is not None:
                raise event.error
            tokens += len(event.new_token_ids)
    seconds = time.perf_counter() - start
    stats = engine.stats()
    engine.close()
    assert tokens == requests * NEW_TOKENS and stats.preemptions == 0
    return tokens / seconds


def run(name: str, rounds: int) -> None:
    """Prints one JSON line for a shape."""
    raw = SHAPES[name] | {"num_hidden_layers": len(SHAPES[name]["layer_types"])}
    config = config_from_hf(raw)
    engine = EngineConfig(
        max_num_seqs=1, max_model_len=CONTEXT, max_num_batched_tokens=512, prefix_cache=False
    ).resolve(config)
    groups = model_groups(config, engine, "bfloat16")
    budget, counts = concurrency(groups, engine, jax.default_backend(), CONTEXT, LEAST)
    model, requests = random_model(config), 2 * max(counts.values())
    speeds: dict[str, list[float]] = {formula: [] for formula in counts}
    for i in range(rounds):
        for formula, sequences in counts.items():
            speeds[formula].append(throughput(model, sequences, budget, requests, i))
    medians = {formula: statistics.median(values) for formula, values in speeds.items()}
    print(json.dumps({
        "shape": name,
        "layers": config.layer_counts,
        "context": CONTEXT,
        "cache_bytes": budget,
        "requests": requests,
        "sequences": counts,
        "tokens_per_second": {f: round(v, 1) for f, v in medians.items()},
        "range": {f: [round(min(v), 1), round(max(v), 1)] for f, v in speeds.items()},
        "gain_in_sequences": round(counts["layer by layer"] / counts["largest layer"], 2),
        "gain_in_speed": round(medians["layer by layer"] / medians["largest layer"], 2),
    }), flush=True)  # fmt: skip


def plan_nemotron() -> None:
    """Prints the sequences of a Nemotron-3-Nano by each formula, at several lengths."""
    norm = config_from_hf(SHAPES["gemma-3"] | {"num_hidden_layers": 12})
    config = EngineConfig(max_num_seqs=1, prefix_cache=False).resolve(norm)
    for context in (1024, 8192, 65536):
        budget, counts = concurrency(NEMOTRON, config, "gpu", context, 64)
        gain = round(counts["layer by layer"] / counts["largest layer"], 2)
        line = {"shape": "nemotron-3-nano, planned", "context": context, "cache_bytes": budget}
        print(json.dumps(line | {"sequences": counts, "gain_in_sequences": gain}), flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    plan_nemotron()
    for name in args.shapes:
        run(name, args.rounds)


if __name__ == "__main__":
    main()
