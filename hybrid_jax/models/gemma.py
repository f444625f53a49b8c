"""Gemma 2 and Gemma 3 (text): sliding and full layers, norms on both sides of each half."""

from collections.abc import Collection, Mapping
from typing import Any

from hybrid_jax.config import ModelConfig
from hybrid_jax.models import hf_config as hf
from hybrid_jax.models import weights as w
from hybrid_jax.specs import AttentionSpec, LayerSpec, MLPSpec, NormSpec, RopeSpec

MODEL_TYPES = ("gemma2", "gemma3", "gemma3_text")
IGNORED = (
    "model.vision_tower.*",
    "model.multi_modal_projector.*",
    "vision_tower.*",
    "multi_modal_*",
)
NORMS = {
    "pre_mixer_norm": "input_layernorm",
    "post_mixer_norm": "post_attention_layernorm",
    "pre_ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """`Gemma2Config`, `Gemma3TextConfig`, or the text part of `Gemma3Config`."""
    third = config["model_type"] != "gemma2"
    norm = NormSpec("rms1p", config.get("rms_norm_eps", 1e-6))
    head_dim = config.get("head_dim") or 256
    period = (config.get("sliding_window_pattern") or 6) if third else 2
    types = hf.layer_types(
        config, lambda i: hf.SLIDING if (i + 1) % period else hf.FULL, (hf.FULL, hf.SLIDING)
    )
    window = config.get("sliding_window") or 4096
    if config.get("use_bidirectional_attention"):
        window = window // 2 + 1
    fields = hf.common(config)
    softcap = config.get("attn_logit_softcapping", None if third else 50.0)
    heads = config.get("num_attention_heads", 8)
    scalar = config.get("query_pre_attn_scalar", 256)
    mlp = MLPSpec(config["intermediate_size"], hf.activation(config, "gelu_pytorch_tanh"))
    layers = tuple(
        LayerSpec(
            AttentionSpec(
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads", 4),
                head_dim=head_dim,
                scale=scalar**-0.5,
                rope=_rope(config, kind, head_dim, fields["max_position"], third),
                window=window if kind == hf.SLIDING else None,
                softcap=softcap,
                qk_norm=norm if third else None,
                qkv_bias=config.get("attention_bias", False),
                out_bias=config.get("attention_bias", False),
            ),
            mlp,
            norm,
            layout="sandwich",
        )
        for kind in types
    )
    return ModelConfig(
        layers=layers,
        final_norm=norm,
        tie_word_embeddings=config.get("tie_word_embeddings", True),
        embed_scale=fields["hidden_size"] ** 0.5,
        logit_softcap=config.get("final_logit_softcapping", None if third else 30.0),
        **fields,
    )


def _rope(
    config: Mapping[str, Any], kind: str, head_dim: int, max_position: int, third: bool
) -> RopeSpec:
    """Gemma 3 turns sliding layers with a base of their own and never scales them."""
    params = hf.rope_parameters(config, kind)
    default = 1e4
    if third and kind == hf.FULL:
        default = 1e6
    elif third and hf.SLIDING not in (config.get("rope_parameters") or {}):
        params = {"rope_theta": config.get("rope_local_base_freq")}
    return hf.rope_spec(params, head_dim, theta=default, max_position=max_position)


def weight_rules(config: ModelConfig, names: Collection[str]) -> list[w.Rule]:
    """Hub names equal HF's runtime names."""
    rules = w.outer_rules(config)
    for i, layer in enumerate(config.layers):
        rules += w.attention_rules(i, w.attention(layer)) + w.ffn_rules(i, layer, names)
        rules += w.norm_rules(i, NORMS)
    return rules


def rename(name: str) -> str:
    """Multimodal checkpoints put the text model under `language_model`."""
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")
