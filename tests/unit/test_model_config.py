"""Every value that config.json can hold becomes a ModelConfig or one sentence that names it."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from hybrid_jax.cache.plan import model_groups, table_width
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.errors import ModelError
from hybrid_jax.models import config_from_hf
from tests.helpers.tiny import TINY

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**40, 10**400, 0.5, -0.5, 1e300, float("nan"), float("inf"),
    "", "abc", "8", [], [1], ["abc"], [None], {}, {"rope_type": "yarn"}, {"a": []},
)  # fmt: skip


def places(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The path to every field, nested ones included."""
    for name, value in config.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *rest) for rest in places(value))


@pytest.mark.parametrize("name", TINY)
def test_any_value_in_any_field_is_accepted_or_refused_by_name(name: str) -> None:
    refused = 0
    for path in places(TINY[name]):
        for value in VALUES:
            config = copy.deepcopy(TINY[name])
            parent = config
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = value
            try:
                assert isinstance(config_from_hf(config), ModelConfig)
            except ModelError as error:
                refused += 1
                message = str(error)
                assert "\n" not in message and len(message) < 400, message
    assert refused > 100


BAD: list[tuple[str, str, Any, str]] = [
    ("qwen3", "hidden_size", "abc", "hidden_size of config.json must be an integer, got 'abc'"),
    ("qwen3", "hidden_size", -64, "hidden_size of config.json must be at least 1, got -64"),
    ("qwen3", "vocab_size", 128.0, "vocab_size of config.json must be an integer, got 128.0"),
    ("qwen3", "num_hidden_layers", 10**9, "num_hidden_layers of config.json must be at most 10000"),
    ("qwen3", "num_attention_heads", None, "has no 'num_attention_heads'; add it"),
    ("qwen3", "num_key_value_heads", 3, "no multiple of 3 KV heads"),
    ("qwen3", "head_dim", 7, "rope over 7 channels"),
    ("qwen3", "rms_norm_eps", -1.0, "rms_norm_eps of config.json must be in"),
    ("qwen3", "rms_norm_eps", float("nan"), "rms_norm_eps of config.json must be in .* got nan"),
    ("qwen3", "tie_word_embeddings", "no", "tie_word_embeddings of config.json must be a bool"),
    ("olmo_hybrid", "hidden_size", 2, "hidden_size of config.json is 2, too little for 4 heads"),
    (
        "qwen3",
        "hidden_act",
        ["silu"],
        r"hidden_act of config.json must be a string, got \['silu'\]",
    ),
    ("qwen3", "rope_parameters", "x", "rope_parameters of config.json must be an object, got 'x'"),
    ("qwen3", "rope_parameters", {"rope_theta": "x"}, "rope_theta of rope_parameters of config"),
    ("qwen3", "model_type", 5, "model_type of config.json must be a string, got 5"),
    ("qwen3", "layer_types", "full_attention", "layer_types of config.json must be a list"),
    ("qwen3", "layer_types", [5, 5], "layer_types of config.json must be a string, got 5"),
    ("qwen3", "eos_token_id", "</s>", "eos_token_id of config.json must be an integer, got '</s>'"),
    ("qwen3", "eos_token_id", 2**40, "eos_token_id of config.json must be at most"),
    ("qwen3", "eos_token_id", list(range(33)), "eos_token_id of config.json must have at most 32"),
    ("qwen3", "max_position_embeddings", 1, "max_position_embeddings of config.json must be at"),
    ("lara_mini", "linear_conv_kernel_dim", 1, "linear_conv_kernel_dim of config.json must be at"),
    ("lara_mini", "num_experts_per_tok", 99, "99 experts per token of only"),
    ("gemma3", "sliding_window", 10**12, "sliding_window of config.json must be at most"),
    ("gemma3", "query_pre_attn_scalar", 0, "query_pre_attn_scalar of config.json must be in"),
    ("qwen3_5-multimodal", "text_config", [1], "text_config of config.json must be an object"),
]


@pytest.mark.parametrize(("name", "field", "value", "words"), BAD)
def test_a_bad_value_is_named(name: str, field: str, value: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        config_from_hf(TINY[name] | {field: value})


def test_a_window_longer_than_any_sequence_needs_no_larger_table() -> None:
    model = config_from_hf(TINY["gemma3"] | {"sliding_window": 2**31 - 1})
    engine = EngineConfig(max_model_len=64, page_size=16).resolve(model)
    groups = model_groups(model, engine, "float32")
    assert [table_width(group.spec, engine) for group in groups] == [4, 4]  # type: ignore[arg-type]
