"""Names, shapes and random values of every tensor of a tiny checkpoint, as published on the hub.

The names are written out here on their own, apart from the weight rules of `hybrid_jax.models`: the
live parity test holds them against transformers, so a wrong rule cannot be wrong on both sides.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

Config = dict[str, Any]
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def shapes(config: Config, *, fused_experts: bool = False, saved_names: bool = False) -> Shapes:
    """Name and shape of every tensor of the checkpoint that `config` (a config.json) describes.

    `fused_experts`: one stacked tensor for all experts instead of one per expert, where the family
    allows both. `saved_names`: the names that transformers' save_pretrained writes where they
    differ from the published ones.
    """
    text = config.get("text_config", config)
    wrapped = "text_config" in config
    prefix = "model.language_model" if wrapped else "model"
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    yield f"{prefix}.embed_tokens.weight", (vocab, hidden)
    yield f"{prefix}.norm.weight", (hidden,)
    if not text["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)
    for layer, linear in enumerate(linear_layers(text)):
        at = f"{prefix}.layers.{layer}"
        yield from _norms(at, text, linear, saved_names)
        if linear:
            yield from _gated_delta(f"{at}.linear_attn", text, saved_names)
        else:
            yield from _attention(f"{at}.self_attn", text)
        if _is_sparse(text, layer):
            yield from _moe(f"{at}.mlp", text, fused_experts)
        else:
            yield from _mlp(f"{at}.mlp", hidden, text["intermediate_size"])
    if wrapped:  # what a text-only loader must skip
        yield "model.visual.patch_embed.proj.weight", (32, 3, 2, 4, 4)
        yield "model.visual.blocks.0.attn.qkv.bias", (96,)
        yield "mtp.fc.weight", (hidden, 2 * hidden)
        yield "mtp.layers.0.input_layernorm.weight", (hidden,)
    elif family(text) == "qwen3_next":
        yield "mtp.norm.weight", (hidden,)


def values(name: str, shape: tuple[int, ...], config: Config, seed: int) -> np.ndarray:
    """Float32 values of one tensor: a pure function of (seed, name), the same on every machine.

    Uniform, from raw Philox words: NumPy keeps the words of a bit generator for ever, but not the
    numbers that a `Generator` makes of them.
    """
    text = config.get("text_config", config)
    bits = np.random.Philox(key=[seed, zlib.crc32(name.encode())]).random_raw(int(np.prod(shape)))
    unit = ((bits >> np.uint64(40)).astype(np.float64) / 2.0**24 - 0.5) * 12.0**0.5
    mean, std = _moments(name, shape, text)
    return (mean + std * unit).astype(np.float32).reshape(shape)


def family(text: Config) -> str:
    """The family of a text config: its model type without the suffix of text-only configs."""
    return text["model_type"].removesuffix("_text")


def linear_layers(text: Config) -> list[bool]:
    """Which layers are gated delta nets: by the explicit list, or by the rule of older files."""
    if "layer_types" in text:
        return [kind == "linear_attention" for kind in text["layer_types"]]
    every = text.get("full_attention_interval", 1)
    return [(i + 1) % every != 0 for i in range(text["num_hidden_layers"])]


def _moments(name: str, shape: tuple[int, ...], text: Config) -> tuple[float, float]:
    """Mean and standard deviation that keep activations and logits of order one to ten."""
    leaf = name.removesuffix(".weight").split(".")[-1]
    if leaf == "A_log":  # half-lives of a few tokens to hundreds
        return -2.5, 1.0
    if leaf == "dt_bias":
        return -1.0, 0.5
    if leaf.endswith("conv1d"):
        return 0.0, 0.5
    if leaf == "embed_tokens":
        # Small next to what the layers add: greedy text must not be the last token over and over.
        return 0.0, 0.05 if text["tie_word_embeddings"] else 0.5
    if leaf == "lm_head":
        return 0.0, 0.4
    if len(shape) == 1:
        centred = family(text) in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma2", "gemma3")
        plain = 1.0 if "norm" in leaf and (not centred or "linear_attn" in name) else 0.0
        final = 6.0 if text["tie_word_embeddings"] and name.endswith("model.norm.weight") else 0.0
        sharper = 2.0 if leaf == "q_norm" else 0.0
        return plain + final + sharper, 0.3
    # Sharp attention, a router far from uniform, layers that add as much as they read: otherwise
    # greedy text settles into a short cycle that many a wrong model would reach as well.
    gains = {"q_proj": 3.0, "gate": 2.0, "o_proj": 2.0, "out_proj": 2.0}
    return 0.0, gains.get(leaf, 1.0) / shape[-1] ** 0.5


def _is_sparse(text: Config, layer: int) -> bool:
    if layer in text.get("mlp_only_layers", ()) or "num_experts" not in text:
        return False
    return (layer + 1) % text.get("decoder_sparse_step", 1) == 0


def _norms(at: str, text: Config, linear: bool, saved_names: bool) -> Shapes:
    names = ["input_layernorm", "post_attention_layernorm"]
    if family(text) in ("gemma2", "gemma3"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    elif family(text) == "olmo_hybrid" and linear:
        names = ["attention_layer_norm", "feedforward_layer_norm"]
    elif family(text) == "olmo_hybrid":
        first = "feedforward_layer_norm" if saved_names else "post_attention_layernorm"
        names = [first, "post_feedforward_layernorm"]
    for name in names:
        yield f"{at}.{name}.weight", (text["hidden_size"],)


def _attention(at: str, text: Config) -> Shapes:
    hidden, heads, kv_heads = (
        text[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = text.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, kv_heads * head_dim
    gated = family(text) in ("qwen3_next", "qwen3_5", "qwen3_5_moe")
    for name, rows, columns in (
        ("q_proj", 2 * q if gated else q, hidden),
        ("k_proj", kv, hidden),
        ("v_proj", kv, hidden),
        ("o_proj", hidden, q),
    ):
        yield f"{at}.{name}.weight", (rows, columns)
        if text["attention_bias"]:
            yield f"{at}.{name}.bias", (rows,)
    if family(text) != "gemma2":
        whole = family(text) == "olmo_hybrid"
        yield f"{at}.q_norm.weight", (q if whole else head_dim,)
        yield f"{at}.k_norm.weight", (kv if whole else head_dim,)


def _gated_delta(at: str, text: Config, saved_names: bool) -> Shapes:
    hidden, width = text["hidden_size"], text["linear_conv_kernel_dim"]
    key_heads, value_heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    v_dim = text["linear_value_head_dim"]
    k, v = key_heads * text["linear_key_head_dim"], value_heads * v_dim
    yield f"{at}.A_log", (value_heads,)
    yield f"{at}.dt_bias", (value_heads,)
    if family(text) == "olmo_hybrid":
        rows = {"q": k, "k": k, "v": v, "a": value_heads, "b": value_heads, "g": v}
        for name, size in rows.items():
            yield f"{at}.{name}_proj.weight", (size, hidden)
        for name in "qkv":  # save_pretrained cuts the joint kernel into thirds, whatever q, k, v
            size = (2 * k + v) // 3 if saved_names else rows[name]
            yield f"{at}.{name}_conv1d.weight", (size, 1, width)
        yield f"{at}.o_norm.weight", (v_dim,)
        yield f"{at}.o_proj.weight", (hidden, v)
        return
    yield f"{at}.conv1d.weight", (2 * k + v, 1, width)
    yield f"{at}.out_proj.weight", (hidden, v)
    yield f"{at}.{'out_norm' if family(text) == 'lara_mini' else 'norm'}.weight", (v_dim,)
    inputs = {
        "lara_mini": {"in_proj": 2 * k + 2 * v + 2 * value_heads},
        "qwen3_next": {"in_proj_qkvz": 2 * k + 2 * v, "in_proj_ba": 2 * value_heads},
    }
    split = {"in_proj_qkv": 2 * k + v, "in_proj_z": v}
    split |= {"in_proj_b": value_heads, "in_proj_a": value_heads}
    for name, size in inputs.get(family(text), split).items():
        yield f"{at}.{name}.weight", (size, hidden)


def _mlp(at: str, hidden: int, size: int) -> Shapes:
    yield f"{at}.gate_proj.weight", (size, hidden)
    yield f"{at}.up_proj.weight", (size, hidden)
    yield f"{at}.down_proj.weight", (hidden, size)


def _moe(at: str, text: Config, fused: bool) -> Shapes:
    hidden, experts, size = (
        text[k] for k in ("hidden_size", "num_experts", "moe_intermediate_size")
    )
    yield f"{at}.gate.weight", (experts, hidden)
    if fused or family(text) == "lara_mini":
        yield f"{at}.experts.gate_up_proj", (experts, 2 * size, hidden)
        yield f"{at}.experts.down_proj", (experts, hidden, size)
    else:
        for expert in range(experts):
            yield from _mlp(f"{at}.experts.{expert}", hidden, size)
    yield from _mlp(f"{at}.shared_expert", hidden, text["shared_expert_intermediate_size"])
    if family(text) != "lara_mini":
        yield f"{at}.shared_expert_gate.weight", (1, hidden)
