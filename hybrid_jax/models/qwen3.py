"""Qwen3, dense: full attention with q/k norms; optional window on the upper layers."""

from collections.abc import Collection, Mapping
from typing import Any

from hybrid_jax.config import ModelConfig
from hybrid_jax.models import hf_config as hf
from hybrid_jax.models import weights as w
from hybrid_jax.specs import AttentionSpec, LayerSpec, MLPSpec, NormSpec

MODEL_TYPES = ("qwen3",)
IGNORED = ()


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """`Qwen3Config`."""
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-6))
    head_dim = config.get("head_dim") or 128
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    first_window = config.get("max_window_layers", 28)
    rule = lambda i: hf.SLIDING if window and i >= first_window else hf.FULL  # noqa: E731
    fields = hf.common(config)
    rope = hf.rope_spec(
        hf.rope_parameters(config, hf.FULL),
        head_dim,
        theta=1e4,
        max_position=fields["max_position"],
    )
    heads = config["num_attention_heads"]
    layers = tuple(
        LayerSpec(
            AttentionSpec(
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                rope=rope,
                window=window if kind == hf.SLIDING else None,
                qk_norm=norm,
                qkv_bias=config.get("attention_bias", False),
                out_bias=config.get("attention_bias", False),
            ),
            MLPSpec(config["intermediate_size"], hf.activation(config)),
            norm,
        )
        for kind in hf.layer_types(config, rule, (hf.FULL, hf.SLIDING))
    )
    return ModelConfig(
        layers=layers,
        final_norm=norm,
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        **fields,
    )


def weight_rules(config: ModelConfig, names: Collection[str]) -> list[w.Rule]:
    """Hub names equal HF's runtime names."""
    rules = w.outer_rules(config)
    for i, layer in enumerate(config.layers):
        rules += w.attention_rules(i, w.attention(layer)) + w.ffn_rules(i, layer, names)
        rules += w.norm_rules(i, w.PRE_NORMS)
    return rules
