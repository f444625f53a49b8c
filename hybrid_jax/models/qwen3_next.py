"""Qwen3-Next and Qwen3.5 (dense and MoE, text): three gated delta nets, then one full layer."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from hybrid_jax.config import ModelConfig
from hybrid_jax.models import hf_config as hf
from hybrid_jax.models import weights as w
from hybrid_jax.specs import (
    AttentionSpec,
    FFNSpec,
    GatedDeltaSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
)

MODEL_TYPES = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)
IGNORED = ("mtp.*", "model.mtp.*", "model.visual.*", "visual.*")


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """`Qwen3NextConfig`, `Qwen3_5TextConfig` or `Qwen3_5MoeTextConfig`."""
    norm = NormSpec("rms1p", config.get("rms_norm_eps", 1e-6))
    interval = config.get("full_attention_interval") or 4
    types = hf.layer_types(
        config, lambda i: hf.LINEAR if (i + 1) % interval else hf.FULL, (hf.LINEAR, hf.FULL)
    )
    fields = hf.common(config)
    mixers = {
        hf.LINEAR: gated_delta_spec(config),
        hf.FULL: _attention(config, norm, fields["max_position"]),
    }
    layers = tuple(LayerSpec(mixers[kind], _ffn(config, i), norm) for i, kind in enumerate(types))
    return ModelConfig(
        layers=layers,
        final_norm=norm,
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        **fields,
    )


def gated_delta_spec(config: Mapping[str, Any]) -> GatedDeltaSpec:
    """The `linear_*` fields, with the defaults of HF's classes."""
    return GatedDeltaSpec(
        num_k_heads=config.get("linear_num_key_heads", 16),
        num_v_heads=config.get("linear_num_value_heads", 32),
        k_dim=config.get("linear_key_head_dim", 128),
        v_dim=config.get("linear_value_head_dim", 128),
        conv_width=config.get("linear_conv_kernel_dim", 4),
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )


def _attention(config: Mapping[str, Any], norm: NormSpec, max_position: int) -> AttentionSpec:
    head_dim = config.get("head_dim") or 256
    rope = hf.rope_spec(
        hf.rope_parameters(config, hf.FULL),
        head_dim,
        theta=1e4,
        max_position=max_position,
        partial=0.25,
    )
    return AttentionSpec(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        output_gate=True,
        qk_norm=norm,
        qkv_bias=config.get("attention_bias", False),
        out_bias=config.get("attention_bias", False),
    )


def _ffn(config: Mapping[str, Any], i: int) -> FFNSpec:
    kind = config["model_type"]
    experts = config.get("num_experts") or 0
    sparse = experts > 0 and (i + 1) % (config.get("decoder_sparse_step") or 1) == 0
    if kind.startswith("qwen3_5_moe"):
        sparse = True
    if not sparse or i in (config.get("mlp_only_layers") or ()):
        return MLPSpec(config["intermediate_size"], hf.activation(config))
    return MoESpec(
        num_experts=experts,
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        activation=hf.activation(config),
        renormalize=kind != "qwen3_next" or config.get("norm_topk_prob", True),
        shared_intermediate_size=config["shared_expert_intermediate_size"],
        shared_gate=True,
    )


def rename(name: str) -> str:
    """Multimodal checkpoints put the text model under `model.language_model`."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name


def weight_rules(config: ModelConfig, names: Collection[str]) -> list[w.Rule]:
    """Qwen3.5 stores q|k|v, z, b and a apart; Qwen3-Next interleaves them per key head."""
    interleaved = config.model_type == "qwen3_next"
    rules = w.outer_rules(config)
    for i, layer in enumerate(config.layers):
        if isinstance(layer.mixer, GatedDeltaSpec):
            rules += w.gated_delta_rules(i)
            rules += _interleaved(i, layer.mixer) if interleaved else _separate(i)
        else:
            rules += w.attention_rules(i, layer.mixer)
        rules += w.ffn_rules(i, layer, names) + w.norm_rules(i, w.PRE_NORMS)
    return rules


def _separate(i: int) -> list[w.Rule]:
    target, source = f"layers.{i}.mixer", f"model.layers.{i}.linear_attn"
    return [
        rule
        for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        for rule in w.linear_rules(f"{target}.{name}", f"{source}.{name}")
    ]


def _interleaved(i: int, spec: GatedDeltaSpec) -> list[w.Rule]:
    """in_proj_qkvz holds per key head [dk q | dk k | r dv v | r dv z], in_proj_ba [r b | r a]."""
    group = spec.num_v_heads // spec.num_k_heads
    sizes = [spec.k_dim, spec.k_dim, group * spec.v_dim, group * spec.v_dim]
    target, source = f"layers.{i}.mixer", f"model.layers.{i}.linear_attn"
    qkvz, ba = (f"{source}.in_proj_qkvz.weight",), (f"{source}.in_proj_ba.weight",)
    take = lambda parts, *which: _take_per_head(spec.num_k_heads, parts, which)  # noqa: E731
    return [
        w.Rule(f"{target}.in_proj_qkv.weight", qkvz, take(sizes, 0, 1, 2)),
        w.Rule(f"{target}.in_proj_z.weight", qkvz, take(sizes, 3)),
        w.Rule(f"{target}.in_proj_b.weight", ba, take([group, group], 0)),
        w.Rule(f"{target}.in_proj_a.weight", ba, take([group, group], 1)),
    ]


def _take_per_head(
    heads: int, sizes: list[int], which: tuple[int, ...]
) -> Callable[[w.Array], w.Array]:
    """Un-interleaves rows [heads * sum(sizes), D]: the parts `which`, heads contiguous in each."""

    def convert(array: w.Array) -> w.Array:
        per_head = array.reshape(heads, sum(sizes), array.shape[-1])
        starts = [sum(sizes[:p]) for p in which]
        parts = [per_head[:, s : s + sizes[p]] for s, p in zip(starts, which, strict=True)]
        return w.concat(*(part.reshape(-1, array.shape[-1]) for part in parts))

    return convert
