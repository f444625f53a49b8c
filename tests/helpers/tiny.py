"""Tiny checkpoints of every family: configs, seeded random weights and a writer.

`TINY` maps a name to the config.json of a checkpoint. A plain name is the family as transformers
saves it today; `family-variant` is another form in which its checkpoints exist, or a feature that
needs a config of its own. Windows, rotary ranges and layer patterns are small enough for prompts of
a few dozen tokens to cross every border.

No config names an end-of-sequence token: greedy references of a fixed length come out of any loop.
"""

import copy
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.helpers import tiny_weights

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"

_BASE = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": None,
    "head_dim": 16,
    "hidden_size": 64,
    "initializer_range": 0.02,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
    "use_cache": True,
    "vocab_size": 128,
}
_GATED_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}
_MOE = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 32,
}
_QWEN35_ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "rope_type": "default",
}

VOCAB_SIZE = _BASE["vocab_size"]

Config = dict[str, Any]


def _config(model_type: str, architecture: str, *parts: Config, **changes: Any) -> Config:
    merged = {"architectures": [architecture], "model_type": model_type, **_BASE}
    for part in (*parts, changes):
        merged |= part
    return merged


def _without(config: Config, *keys: str) -> Config:
    return {key: value for key, value in config.items() if key not in keys}


def _qwen3() -> dict[str, Config]:
    base = _config(
        "qwen3",
        "Qwen3ForCausalLM",
        hidden_act="silu",
        intermediate_size=96,
        layer_types=[FULL] * 3,
        max_window_layers=28,
        num_hidden_layers=3,
        sliding_window=None,
        use_sliding_window=False,
    )
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64, "rope_type": "yarn"}
    long = {"rope_theta": 1000000, "rope_scaling": yarn, "max_position_embeddings": 256}
    long |= {"tie_word_embeddings": True}
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    window |= {"layer_types": [FULL, SLIDING, SLIDING], "attention_bias": True}
    return {
        "qwen3": base,
        # As published: top-level theta, no list of layer types, embeddings shared with the head.
        "qwen3-yarn": _without(base, "rope_parameters", "layer_types") | long,
        "qwen3-window": base | window,
    }


def _qwen3_next() -> dict[str, Config]:
    base = _config(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _GATED_DELTA,
        _MOE,
        decoder_sparse_step=1,
        hidden_act="silu",
        intermediate_size=96,
        layer_types=[LINEAR, LINEAR, LINEAR, FULL],
        mlp_only_layers=[1],
        norm_topk_prob=True,
        num_hidden_layers=4,
        rope_parameters=_BASE["rope_parameters"] | {"partial_rotary_factor": 0.25},
    )
    old = {"full_attention_interval": 2, "decoder_sparse_step": 2, "mlp_only_layers": []}
    old |= {"rope_theta": 10000, "partial_rotary_factor": 0.5, "rope_scaling": None}
    old |= {"norm_topk_prob": False, "linear_num_value_heads": 2}
    return {
        "qwen3_next": base,
        # As published: layers by interval, theta and rotary share at the top level.
        "qwen3_next-interval": _without(base, "layer_types", "rope_parameters") | old,
    }


def _wrapped(model_type: str, architecture: str, text: Config, *, tied: bool) -> Config:
    """A multimodal config around a text config, with the extra keys that published files carry."""
    text = text | {"full_attention_interval": 4, "attn_output_gate": True, "vocab_size": 128}
    text = _without(text, "architectures") | {"tie_word_embeddings": tied}
    vision = {"model_type": f"{model_type}_vision", "depth": 1, "hidden_size": 32, "num_heads": 2}
    vision |= {"intermediate_size": 32, "out_hidden_size": 64, "patch_size": 4}
    return {
        "architectures": [architecture],
        "image_token_id": 120,
        "model_type": model_type,
        "text_config": text,
        "tie_word_embeddings": tied,
        "transformers_version": "5.24.0",
        "video_token_id": 121,
        "vision_config": vision,
        "vision_end_token_id": 123,
        "vision_start_token_id": 122,
    }


def _qwen3_5() -> dict[str, Config]:
    common = {
        "hidden_act": "silu",
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
        "num_hidden_layers": 4,
        "rope_parameters": _QWEN35_ROPE,
    }
    dense = _config(
        "qwen3_5_text", "Qwen3_5ForCausalLM", _GATED_DELTA, common, intermediate_size=96
    )
    moe = _config("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _GATED_DELTA, _MOE, common)
    return {
        "qwen3_5": dense,
        "qwen3_5-multimodal": _wrapped(
            "qwen3_5", "Qwen3_5ForConditionalGeneration", dense, tied=True
        ),
        "qwen3_5_moe": moe,
        "qwen3_5_moe-multimodal": _wrapped(
            "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", moe, tied=False
        ),
    }


def _olmo_hybrid() -> dict[str, Config]:
    base = _config(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        _GATED_DELTA,
        hidden_act="silu",
        intermediate_size=96,
        layer_types=[LINEAR, LINEAR, LINEAR, FULL],
        linear_allow_neg_eigval=True,
        num_hidden_layers=4,
    )
    base = _without(base, "head_dim")
    nope = {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    nope |= {"linear_allow_neg_eigval": False, "num_key_value_heads": 4}
    return {"olmo_hybrid": base, "olmo_hybrid-nope": base | nope}


def _lara_mini() -> dict[str, Config]:
    base = _config(
        "lara_mini",
        "LaraMiniForCausalLM",
        _GATED_DELTA,
        _MOE,
        hidden_act="silu",
        layer_types=[LINEAR, SLIDING, LINEAR, FULL, SLIDING],
        norm_topk_prob=True,
        num_hidden_layers=5,
        sliding_window=8,
        tie_word_embeddings=True,
    )
    untied = {"tie_word_embeddings": False, "norm_topk_prob": False, "num_hidden_layers": 3}
    untied |= {"layer_types": [SLIDING, LINEAR, FULL], "linear_num_key_heads": 4}
    return {"lara_mini": base, "lara_mini-untied": base | untied}


def _gemma() -> dict[str, Config]:
    common = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": 96,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    }
    gemma2 = _config(
        "gemma2",
        "Gemma2ForCausalLM",
        common,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=10.0,
        layer_types=[SLIDING, FULL] * 2,
        num_hidden_layers=4,
        use_bidirectional_attention=None,
    )
    by_kind = {FULL: {"rope_theta": 1000000.0, "rope_type": "default"}}
    by_kind |= {SLIDING: {"rope_theta": 10000.0, "rope_type": "default"}}
    gemma3 = _config(
        "gemma3_text",
        "Gemma3ForCausalLM",
        common,
        _sliding_window_pattern=6,
        layer_types=[SLIDING] * 5 + [FULL],
        num_hidden_layers=6,
        rope_parameters=by_kind,
        use_bidirectional_attention=False,
    )
    linear = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1000000.0}
    linear |= {"rope_local_base_freq": 10000.0, "sliding_window_pattern": 3}
    old = _without(gemma3, "layer_types", "rope_parameters", "_sliding_window_pattern")
    return {
        "gemma2": gemma2,
        # As published: no list of layer types, thetas at the top level; 4B and larger scale the
        # positions of global layers.
        "gemma2-pattern": _without(gemma2, "layer_types", "rope_parameters")
        | {"rope_theta": 10000.0, "cache_implementation": "hybrid"},
        "gemma3": gemma3,
        "gemma3-linear": old | linear,
    }


TINY: dict[str, Config] = {
    **_qwen3(),
    **_qwen3_next(),
    **_qwen3_5(),
    **_olmo_hybrid(),
    **_lara_mini(),
    **_gemma(),
}
_FUSED_EXPERTS = {"qwen3_5_moe-multimodal"}
_SAVED_NAMES = {"olmo_hybrid-nope"}


def tensors(name: str, seed: int) -> dict[str, np.ndarray]:
    """All tensors of the checkpoint `TINY[name]`: hub names to float32 arrays."""
    config = TINY[name]
    shapes = tiny_weights.shapes(
        config, fused_experts=name in _FUSED_EXPERTS, saved_names=name in _SAVED_NAMES
    )
    return {key: tiny_weights.values(key, shape, config, seed) for key, shape in shapes}


def write_checkpoint(
    name: str, directory: Path, seed: int, *, shards: int = 1, dtype: str = "float32"
) -> Path:
    """Writes config.json and the safetensors of `TINY[name]` and returns the directory.

    Tensors are dealt out to the shards in turn, so that every layer crosses shards. `dtype` rounds
    all of them: float32, bfloat16 or float16.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(TINY[name])
    config.get("text_config", config)["dtype"] = dtype
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    weights = {key: value.astype(numpy_dtype) for key, value in tensors(name, seed).items()}
    _write_shards(weights, directory, shards)
    return directory


def _write_shards(weights: dict[str, np.ndarray], directory: Path, shards: int) -> None:
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata)
        return
    names, weight_map = sorted(weights), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: weights[key] for key in names[shard::shards]}
        save_file(part, directory / file, metadata)
        weight_map |= dict.fromkeys(part, file)
    total = sum(value.nbytes for value in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
