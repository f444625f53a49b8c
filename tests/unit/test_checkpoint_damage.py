"""Damaged and impossible checkpoints: one ModelError that names the value, never a traceback."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hybrid_jax.errors import ModelError
from hybrid_jax.inspection import inspect_model
from hybrid_jax.loading import load_model
from tests.helpers import tiny


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny.write_checkpoint("lara_mini", tmp_path, 0)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": "4"}, "num_attention_heads .* got '4'"),
        ({"num_attention_heads": 3}, "no multiple of"),
        ({"num_key_value_heads": 0}, "num_key_value_heads .* got 0"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"num_experts_per_tok": 9}, "9 experts per token"),
        ({"num_experts_per_tok": 0}, "top_k is 0"),
        ({"vocab_size": [1]}, r"vocab_size .* got \[1\]"),
        ({"layer_types": 5}, "layer_types .* got 5"),
        ({"rope_parameters": [1]}, r"rope_parameters .* got \[1\]"),
        ({"eos_token_id": 2.5}, "eos_token_id .* got 2.5"),
        ({"eos_token_id": "12"}, "eos_token_id .* got '12'"),
        ({"model_type": ["lara_mini"]}, r"model_type .* must be a string, got \[\'lara_mini\'\]"),
    ],
)
def test_impossible_configs(checkpoint: Path, changes: dict[str, Any], said: str) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=said):
        load_model(checkpoint)
    with pytest.raises(ModelError, match=said):
        inspect_model(checkpoint)


def test_a_tensor_in_two_files(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.safetensors"))
    shutil.copy(file, checkpoint / "z-other.safetensors")
    with pytest.raises(ModelError, match="another file"):
        load_model(checkpoint)


def test_integer_weights(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)
    save_file(tensors, file)
    with pytest.raises(ModelError, match="only floats"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    "change", [{"dtype": "F16"}, {"data_offsets": ["0", "4"]}, {"shape": None}]
)
def test_headers_that_lie(checkpoint: Path, change: dict[str, Any]) -> None:
    file = next(checkpoint.glob("*.safetensors"))
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"] |= change
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ModelError, match="truncated or not a safetensors file"):
        load_model(checkpoint)
