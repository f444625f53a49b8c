"""The shape of the bundled model: a `lara_mini` configuration small enough to ship in the wheel.

One period of the family's pattern, so every mixer occurs: two gated delta nets, two sliding
layers with rope, one full layer without. The window is shorter than most recall distances (see
`recall.py`), hence a fact can only reach its question through the full and the linear layers.
"""

from __future__ import annotations

import math

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
MAX_LENGTH = 2048
VOCAB_SIZE = 2048

LAYER_PATTERN = (
    "linear_attention",
    "sliding_attention",
    "linear_attention",
    "full_attention",
    "sliding_attention",
)

CONFIG: dict = {
    "architectures": ["LaraMiniForCausalLM"],
    "model_type": "lara_mini",
    "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "num_hidden_layers": 5,
    "layer_types": list(LAYER_PATTERN),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "sliding_window": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": MAX_LENGTH,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


def _mixer_shapes(config: dict, layer_type: str) -> dict[str, tuple[int, ...]]:
    """Hub names (without the layer prefix) and shapes of one layer's token mixer."""
    d = config["hidden_size"]
    if layer_type == "linear_attention":
        hk, hv = config["linear_num_key_heads"], config["linear_num_value_heads"]
        dk, dv = config["linear_key_head_dim"], config["linear_value_head_dim"]
        qkv = 2 * hk * dk + hv * dv
        return {
            "linear_attn.in_proj.weight": (qkv + hv * dv + 2 * hv, d),  # rows [q|k|v|z|b|a]
            "linear_attn.conv1d.weight": (qkv, 1, config["linear_conv_kernel_dim"]),
            "linear_attn.A_log": (hv,),
            "linear_attn.dt_bias": (hv,),
            "linear_attn.out_norm.weight": (dv,),
            "linear_attn.out_proj.weight": (d, hv * dv),
        }
    n, k, h = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    return {
        "self_attn.q_proj.weight": (n * h, d),
        "self_attn.k_proj.weight": (k * h, d),
        "self_attn.v_proj.weight": (k * h, d),
        "self_attn.o_proj.weight": (d, n * h),
        "self_attn.q_norm.weight": (h,),
        "self_attn.k_norm.weight": (h,),
    }


def tensor_shapes(config: dict = CONFIG) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint by hub name; the tied `lm_head` is not stored."""
    d, e = config["hidden_size"], config["num_experts"]
    f, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
    block = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate.weight": (e, d),
        "mlp.experts.gate_up_proj": (e, 2 * f, d),
        "mlp.experts.down_proj": (e, d, f),
        "mlp.shared_expert.gate_proj.weight": (shared, d),
        "mlp.shared_expert.up_proj.weight": (shared, d),
        "mlp.shared_expert.down_proj.weight": (d, shared),
    }
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    for index, layer_type in enumerate(config["layer_types"]):
        for name, shape in (block | _mixer_shapes(config, layer_type)).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    return shapes


def parameter_count(config: dict = CONFIG) -> int:
    """Number of scalars in the checkpoint."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())
