"""Olmo Hybrid: gated delta nets with norms before, full attention with norms after."""

from collections.abc import Collection, Mapping
from typing import Any

from hybrid_jax.config import ModelConfig
from hybrid_jax.errors import ModelError
from hybrid_jax.models import hf_config as hf
from hybrid_jax.models import weights as w
from hybrid_jax.specs import AttentionSpec, GatedDeltaSpec, LayerSpec, MLPSpec, NormSpec

MODEL_TYPES = ("olmo_hybrid",)
IGNORED = ()
LINEAR_NORMS = {
    "pre_mixer_norm": "attention_layer_norm",
    "pre_ffn_norm": "feedforward_layer_norm",
}
FULL_NORMS = {
    "post_mixer_norm": "post_attention_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """`OlmoHybridConfig`. `rope_theta` null means no positions at all."""
    norm = NormSpec("rms32", config.get("rms_norm_eps", 1e-6))
    count = hf.required(config, "num_hidden_layers")
    rule = [hf.FULL if i % 4 == 3 else hf.LINEAR for i in range(count)]
    if hf.FULL not in rule:
        rule[-1] = hf.FULL
    types = hf.layer_types(config, lambda i: rule[i], (hf.LINEAR, hf.FULL))
    fields = hf.common(config)
    mlp = MLPSpec(config["intermediate_size"], hf.activation(config))
    full = LayerSpec(_attention(config, norm, fields["max_position"]), mlp, norm, layout="post")
    linear = LayerSpec(_gated_delta(config), mlp, norm, layout="pre")
    return ModelConfig(
        layers=tuple(full if kind == hf.FULL else linear for kind in types),
        final_norm=norm,
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        **fields,
    )


def _attention(config: Mapping[str, Any], norm: NormSpec, max_position: int) -> AttentionSpec:
    heads = config["num_attention_heads"]
    head_dim = _head_dim(config, "head_dim", heads)
    params = hf.rope_parameters(config, hf.FULL)
    rope = None
    if params.get("rope_theta") is not None:
        rope = hf.rope_spec(params, head_dim, theta=5e5, max_position=max_position)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        qk_norm=norm,
        qk_norm_width="projection",
        qkv_bias=config.get("attention_bias", False),
        out_bias=config.get("attention_bias", False),
    )


def _gated_delta(config: Mapping[str, Any]) -> GatedDeltaSpec:
    heads = config["num_attention_heads"]
    k_heads = config.get("linear_num_key_heads") or heads
    k_dim = _head_dim(config, "linear_key_head_dim", k_heads, share=0.75)
    return GatedDeltaSpec(
        num_k_heads=k_heads,
        num_v_heads=config.get("linear_num_value_heads") or heads,
        k_dim=k_dim,
        v_dim=config.get("linear_value_head_dim") or 2 * k_dim,
        conv_width=config.get("linear_conv_kernel_dim", 4),
        norm_eps=1e-5,  # fixed in the model's code, whatever rms_norm_eps says
        allow_neg_eigval=config.get("linear_allow_neg_eigval", True),
    )


def _head_dim(config: Mapping[str, Any], name: str, heads: int, *, share: float = 1.0) -> int:
    """config[name], or a head's part of that share of the hidden size."""
    dim = config.get(name) or int(share * config["hidden_size"] / heads)
    if dim < 1:
        raise ModelError(
            f"hidden_size of config.json is {config['hidden_size']}, too little for {heads} heads; "
            f"correct it or add {name}"
        )
    return dim


def weight_rules(config: ModelConfig, names: Collection[str]) -> list[w.Rule]:
    """The hub keeps q, k, v and their convolutions apart, and names norms by the kind of layer."""
    rules = w.outer_rules(config)
    for i, layer in enumerate(config.layers):
        if isinstance(layer.mixer, GatedDeltaSpec):
            rules += _linear(i) + w.norm_rules(i, LINEAR_NORMS)
        else:
            rules += w.attention_rules(i, layer.mixer) + w.norm_rules(i, _full_norms(i, names))
        rules += w.ffn_rules(i, layer, names)
    return rules


def _full_norms(i: int, names: Collection[str]) -> dict[str, str]:
    """transformers' save_pretrained gives the first norm of full layers the linear layers' name."""
    saved = "feedforward_layer_norm"
    if f"model.layers.{i}.{saved}.weight" in names:
        return FULL_NORMS | {"post_mixer_norm": saved}
    return FULL_NORMS


def _linear(i: int) -> list[w.Rule]:
    target, source = f"layers.{i}.mixer", f"model.layers.{i}.linear_attn"
    each = lambda name: tuple(f"{source}.{part}_{name}.weight" for part in "qkv")  # noqa: E731
    one = lambda name: (f"{source}.{name}.weight",)  # noqa: E731
    return [
        w.Rule(f"{target}.in_proj_qkv.weight", each("proj"), w.concat),
        w.Rule(f"{target}.in_proj_z.weight", one("g_proj")),
        w.Rule(f"{target}.in_proj_b.weight", one("b_proj")),
        w.Rule(f"{target}.in_proj_a.weight", one("a_proj")),
        w.Rule(f"{target}.conv_weight", each("conv1d"), w.squeeze_conv),
        w.Rule(f"{target}.A_log", (f"{source}.A_log",)),
        w.Rule(f"{target}.dt_bias", (f"{source}.dt_bias",)),
        w.Rule(f"{target}.norm_weight", one("o_norm")),
        w.Rule(f"{target}.out_proj.weight", one("o_proj")),
    ]
