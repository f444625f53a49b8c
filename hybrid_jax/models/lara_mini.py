"""Lara Mini: linear, sliding, linear, full, sliding, repeated; mixture of experts everywhere."""

from collections.abc import Collection, Mapping
from typing import Any

from hybrid_jax.config import ModelConfig
from hybrid_jax.models import hf_config as hf
from hybrid_jax.models import weights as w
from hybrid_jax.models.qwen3_next import gated_delta_spec
from hybrid_jax.specs import AttentionSpec, GatedDeltaSpec, LayerSpec, MoESpec, NormSpec

MODEL_TYPES = ("lara_mini",)
IGNORED = ()
PATTERN = (hf.LINEAR, hf.SLIDING, hf.LINEAR, hf.FULL, hf.SLIDING)


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """`LaraMiniConfig`. Only sliding layers are rotated; full layers know no positions."""
    norm = NormSpec("rms32", config.get("rms_norm_eps", 1e-6))
    types = hf.layer_types(config, lambda i: PATTERN[i % 5], (hf.LINEAR, hf.SLIDING, hf.FULL))
    fields = hf.common(config)
    defaults = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
    ffn = MoESpec(
        num_experts=config.get("num_experts", 128),
        top_k=config.get("num_experts_per_tok", 4),
        intermediate_size=config.get("moe_intermediate_size", 512),
        activation=hf.activation(config),
        renormalize=config.get("norm_topk_prob", True),
        shared_intermediate_size=config.get("shared_expert_intermediate_size", 512),
    )
    mixers = {
        hf.LINEAR: gated_delta_spec(defaults | dict(config)),
        hf.SLIDING: _attention(config, norm, fields["max_position"], sliding=True),
        hf.FULL: _attention(config, norm, fields["max_position"], sliding=False),
    }
    return ModelConfig(
        layers=tuple(LayerSpec(mixers[kind], ffn, norm) for kind in types),
        final_norm=norm,
        tie_word_embeddings=config.get("tie_word_embeddings", True),
        **fields,
    )


def _attention(
    config: Mapping[str, Any], norm: NormSpec, max_position: int, *, sliding: bool
) -> AttentionSpec:
    head_dim = config.get("head_dim") or 128
    rope = hf.rope_spec(
        hf.rope_parameters(config, hf.SLIDING), head_dim, theta=1e4, max_position=max_position
    )
    return AttentionSpec(
        num_heads=config.get("num_attention_heads", 16),
        num_kv_heads=config.get("num_key_value_heads", 4),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope if sliding else None,
        window=config.get("sliding_window", 512) if sliding else None,
        qk_norm=norm,
        qkv_bias=config.get("attention_bias", False),
        out_bias=config.get("attention_bias", False),
    )


def weight_rules(config: ModelConfig, names: Collection[str]) -> list[w.Rule]:
    """The hub fuses a linear layer's input projections: rows [q|k|v | z | b | a]."""
    rules = w.outer_rules(config)
    for i, layer in enumerate(config.layers):
        if isinstance(layer.mixer, GatedDeltaSpec):
            rules += w.gated_delta_rules(i, norm="out_norm") + _fused(i, layer.mixer)
        else:
            rules += w.attention_rules(i, layer.mixer)
        rules += w.ffn_rules(i, layer, names) + w.norm_rules(i, w.PRE_NORMS)
    return rules


def _fused(i: int, spec: GatedDeltaSpec) -> list[w.Rule]:
    source = (f"model.layers.{i}.linear_attn.in_proj.weight",)
    heads = spec.num_v_heads
    sizes = {"qkv": spec.conv_channels, "z": heads * spec.v_dim, "b": heads, "a": heads}
    rules, start = [], 0
    for name, size in sizes.items():
        target = f"layers.{i}.mixer.in_proj_{name}.weight"
        rules.append(w.Rule(target, source, w.rows(start, start + size)))
        start += size
    return rules
