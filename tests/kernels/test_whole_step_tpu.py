"""Whole steps compile for TPUs, in place: one layer of each kind of models in their full width.

A step is what the engine runs: embedding, layers, head and sampling, with every cache donated.
No pool must be copied. Only the inputs of convolutions, a fortieth of the states, XLA takes to
vector memory and back where two kernels use them.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
import pytest

from hybrid_jax.cache.arrays import StateCache
from hybrid_jax.cache.chips import find_chip
from hybrid_jax.config import EngineConfig
from hybrid_jax.memory.plan import plan_memory
from hybrid_jax.models import config_from_hf
from hybrid_jax.runtime.abstract_step import AbstractStep, abstract_step
from hybrid_jax.runtime.batch import StepKind
from hybrid_jax.runtime.mesh import Partitioner, abstract_mesh
from pallas_kernels import platform, registry
from tests.helpers import tiny
from tests.helpers.tpu import FREE, compile_for, count_calls, needs_libtpu, results

pytestmark = [needs_libtpu, pytest.mark.slow]
CHIPS = ("v5e", "v6e", "tpu7x")
ROWS, TOKENS = 16, 512
SMALL_VOCABULARY = 32768
MOVES = {"copy-start", "copy-done", "slice-start"}  # between memories, beside other work

QWEN35_9B = {
    "model_type": "qwen3_5_text",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_theta": 10000000.0,
        "rope_type": "default",
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
GEMMA3_4B = {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
    "vocab_size": 262208,
}
# Narrow but for its heads, which are those of Llama 3.2 and LFM2: K and V share a row.
HEADS_OF_64 = tiny.TINY["qwen3"] | {
    "hidden_size": 512,
    "num_hidden_layers": 1,
    "layer_types": [tiny.FULL],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 32768,
}
DECODE_ATTENTION = ("paged_attention_write", "paged_attention_decode")
MIXED_ATTENTION = (*DECODE_ATTENTION, "paged_attention_prefill")
# Per model and phase: which implementation of each op is to run, and how often each kernel.
CASES = {
    ("qwen35_9b", StepKind.DECODE): (
        {"gated_delta_net": "mosaic_tpu", "paged_attention": "mosaic_tpu"},
        {"gated_delta_net_decode": 1, **dict.fromkeys(DECODE_ATTENTION, 1)},
    ),
    ("qwen35_9b", StepKind.MIXED): (
        {"gated_delta_net": "mosaic_tpu", "paged_attention": "mosaic_tpu"},
        {
            **dict.fromkeys(("gated_delta_net_decode", "gated_delta_net_prefill"), 1),
            **dict.fromkeys(MIXED_ATTENTION, 1),
        },
    ),
    ("gemma3_4b", StepKind.DECODE): (
        {"paged_attention": "mosaic_tpu"},
        dict.fromkeys(DECODE_ATTENTION, 2),
    ),
    ("gemma3_4b", StepKind.MIXED): (
        {"paged_attention": "mosaic_tpu"},
        dict.fromkeys(MIXED_ATTENTION, 2),
    ),
    ("heads_of_64", StepKind.DECODE): (
        {"paged_attention": "mosaic_tpu"},
        dict.fromkeys(DECODE_ATTENTION, 1),
    ),
}
MODELS = {"qwen35_9b": QWEN35_9B, "gemma3_4b": GEMMA3_4B, "heads_of_64": HEADS_OF_64}


def vocabulary(name: str, kind: StepKind, chip: str) -> int:
    """The whole one, which takes half of the compiler's time, in one step of each model only."""
    whole = MODELS[name]["vocab_size"]
    return whole if (chip, kind) == ("v6e", StepKind.DECODE) else min(whole, SMALL_VOCABULARY)


def build(name: str, kind: StepKind, chip: str) -> AbstractStep:
    """The step as the runner builds it, without any array."""
    model = config_from_hf(MODELS[name] | {"vocab_size": vocabulary(name, kind, chip)})
    config = EngineConfig(max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, cache_bytes=4 << 30)
    target = find_chip(chip)
    plan = plan_memory(model, config, "bfloat16", chip=target, temporaries_from="estimate")
    caches, partitioner = plan.caches, Partitioner(model, abstract_mesh(1))
    with platform.target(target.platform, target.kind):  # pools have the chip's layout
        return abstract_step(
            model, plan.config, plan.dtype, caches.groups, caches.sizes, kind, partitioner
        )


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_step(name: str, kind: StepKind, chip: str) -> None:
    implementations, kernels = CASES[name, kind]
    step = build(name, kind, chip)
    with registry.recording() as choices:
        compiled = compile_for(chip, step.fn, step.arguments, donate=(1,))
    spare = 0
    if (chip, kind) == ("tpu7x", StepKind.MIXED):
        # XLA tiles the unembedding anew for the loop over a prompt's log probabilities.
        spare = 2 * vocabulary(name, kind, chip) * MODELS[name]["hidden_size"]
    mixed = kind == StepKind.MIXED
    check_step(step, compiled, choices, implementations, kernels, spare, moves_inputs=mixed)


def check_step(
    step: AbstractStep,
    compiled: jax.stages.Compiled,
    choices: Sequence[registry.Selection],
    implementations: Mapping[str, str],
    kernels: Mapping[str, int],
    spare: int = 0,
    *,
    moves_inputs: bool = False,
) -> None:
    """The step calls `kernels`, as often, and copies no pool. `spare`: bytes that it may take.
    `moves_inputs`: XLA may move the pool of a convolution between memories.
    """
    chosen = {x.op: x.implementation for x in choices}
    assert {op: chosen[op] for op in implementations} == implementations
    calls = {kernel: count_calls(compiled, kernel) for kernel in kernels}
    assert calls == kernels

    caches = step.carry.caches
    pools = {pool.shape for cache in caches for pool in jax.tree.leaves(cache)}
    movable = {x.conv.shape for x in caches if isinstance(x, StateCache) and moves_inputs}
    for opcode, dims in results(compiled):
        free = FREE | MOVES if dims in movable else FREE
        assert opcode in free or dims not in pools, f"{opcode} makes {dims}, as large as a pool"

    memory = compiled.memory_analysis()
    sizes = [int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(step.carry)]
    assert memory is not None and memory.alias_size_in_bytes >= sum(sizes)
    assert memory.temp_size_in_bytes - spare < max(sizes)
