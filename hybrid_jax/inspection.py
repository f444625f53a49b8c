"""For a human to check: a checkpoint's layers, parameters and cache bytes; which kernels run."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hybrid_jax.cache.chips import Chip, this_chip
from hybrid_jax.cache.plan import CacheLine, describe, model_groups
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.fields import choice
from hybrid_jax.loading import DTYPES, config_dtype, load_config, verify_layer_map
from hybrid_jax.memory.plan import plan_memory
from hybrid_jax.models.decoder import abstract_params
from hybrid_jax.runtime.abstract_step import abstract_step
from hybrid_jax.runtime.batch import StepKind
from hybrid_jax.runtime.mesh import Partitioner, abstract_mesh
from hybrid_jax.specs import AttentionSpec, LayerSpec, MoESpec
from pallas_kernels import platform, registry


@dataclass(frozen=True)
class ModelReport:
    """The facts that `hybrid-jax inspect` prints."""

    config: ModelConfig
    num_parameters: int
    parameter_bytes: int
    max_model_len: int
    caches: tuple[CacheLine, ...]


def inspect_model(
    path: str | Path, *, dtype: str = "bfloat16", max_model_len: int = 0
) -> ModelReport:
    """Reads a model's config (no weights are loaded) and adds up its parameters and caches.

    Args:
        path: a model directory, GGUF file or config.json.
        dtype: of weights, K/V and convolution states; recurrent states are float32 always.
        max_model_len: tokens of the sequence that the bytes are for; 0: the model's, at most 8,192.

    Raises:
        ModelError: the path is no supported model, or its layer map contradicts its tensors.
        ValueError: an unknown dtype.
    """
    choice(DTYPES)("dtype", dtype)
    config, _ = load_config(path)
    verify_layer_map(path, config)
    engine = EngineConfig(max_model_len=max_model_len).resolve(config)
    _, shapes, _ = abstract_params(config, DTYPES[dtype])
    caches = describe(model_groups(config, engine, dtype), engine.max_model_len)
    return ModelReport(
        config,
        sum(math.prod(shape.shape) for shape in shapes.values()),
        sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes.values()),
        engine.max_model_len,
        caches,
    )


def describe_layer(layer: LayerSpec) -> tuple[str, str, str]:
    """Kind, mixer and feed-forward of a layer in words."""
    mixer = layer.mixer
    if isinstance(mixer, AttentionSpec):
        parts = [f"{mixer.num_heads}/{mixer.num_kv_heads} heads x {mixer.head_dim}"]
        if mixer.window is not None:
            parts.append(f"window {mixer.window}")
        parts.append("no rope" if mixer.rope is None else f"rope {mixer.rope.theta:g}")
        if mixer.output_gate:
            parts.append("output gate")
        words = ", ".join(parts)
    else:
        words = (
            f"gated delta, {mixer.num_k_heads}/{mixer.num_v_heads} heads x "
            f"{mixer.k_dim}/{mixer.v_dim}, convolution {mixer.conv_width}"
        )
    ffn = layer.ffn
    if isinstance(ffn, MoESpec):
        shared = ", shared expert" if ffn.shared_intermediate_size else ""
        return layer.kind, words, f"{ffn.top_k} of {ffn.num_experts} experts{shared}"
    return layer.kind, words, f"mlp {ffn.intermediate_size}"


@dataclass(frozen=True)
class KernelChoice:
    """What runs one op on operands of one kind in this process, and why nothing faster does."""

    op: str
    implementation: str
    forced: bool  # by EngineConfig.implementations
    device_kind: str
    operands: dict[str, str]  # dtype[shape], or an option's value
    refused: dict[str, str]  # better-ranked implementation -> reason


def kernel_report() -> tuple[KernelChoice, ...]:
    """Every distinct choice of an implementation since the process began, oldest first."""
    return tuple(_describe(choice) for choice in registry.report())


@dataclass(frozen=True)
class PlannedKernel:
    """What would run one op of a model's steps, and in how many layers."""

    phase: str  # decode: one token for each of max_num_seqs rows; mixed: max_num_batched_tokens
    layers: int
    choice: KernelChoice


def plan_kernels(
    path: str | Path, config: EngineConfig, *, chip: Chip | None = None, dtype: str = "auto"
) -> tuple[PlannedKernel, ...]:
    """What would run each op of a model on a chip that need not be here.

    Traces the largest steps; nothing is compiled and no weights are read.

    Args:
        path: a model directory, GGUF file or config.json.
        config: not resolved; its implementations are forced.
        chip: None: the device at hand.
        dtype: of weights and activations; auto: the checkpoint's.

    Raises:
        ModelError: the path is no supported model.
        ValueError: as `plan_memory`, or a forced implementation cannot run.
    """
    model, raw = load_config(path)
    target = chip or this_chip()
    plan = plan_memory(
        model, config, config_dtype(dtype, raw), chip=chip, temporaries_from="estimate"
    )
    mesh = abstract_mesh(plan.config.tensor_parallel_size)
    caches, planned = plan.caches, []
    for kind in (StepKind.DECODE, StepKind.MIXED):
        with platform.target(target.platform, target.kind), registry.recording() as choices:
            abstract_step(
                model,
                plan.config,
                plan.dtype,
                caches.groups,
                caches.sizes,
                kind,
                Partitioner(model, mesh),
            ).trace()
        counts = Counter(choices)
        planned += [
            PlannedKernel(kind.value, count, _describe(choice)) for choice, count in counts.items()
        ]
    return tuple(planned)


def _describe(choice: registry.Selection) -> KernelChoice:
    return KernelChoice(
        choice.op,
        choice.implementation,
        choice.forced,
        choice.facts.device_kind,
        {name: _operand(value) for name, value in choice.facts.items},
        dict(choice.refused),
    )


def _operand(value: object) -> str:
    if isinstance(value, registry.ArrayFacts):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return str(value)
