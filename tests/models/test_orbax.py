"""Orbax checkpoints: the same model comes back, in any dtype, on any devices."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from hybrid_jax.errors import ModelError
from hybrid_jax.loading import load_model, orbax
from hybrid_jax.loading.hf import read_json
from tests.helpers import tiny


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A converted tiny model with a file next to its weights."""
    source = tiny.write_checkpoint("lara_mini", tmp_path / "hf", 0)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    orbax.convert(source, tmp_path / "orbax-model")
    return tmp_path / "orbax-model"


def test_round_trip(checkpoint: Path) -> None:
    """Every parameter bit by bit, and the stop ids of generation_config.json."""
    before, after = load_model(checkpoint.parent / "hf"), load_model(checkpoint)
    assert (after.config, after.dtype, after.stop_ids) == (before.config, "float32", (5, 7))
    assert before.params.keys() == after.params.keys()
    for key, array in before.params.items():
        assert after.params[key].dtype == array.dtype
        np.testing.assert_array_equal(after.params[key], array, err_msg=key)


@pytest.mark.parametrize("name", ["qwen3_5-multimodal", "qwen3_5_moe"])
def test_other_dtype(tmp_path: Path, name: str) -> None:
    """Stored as asked; read as stored, or cast; float32 parameters stay float32."""
    source = tiny.write_checkpoint(name, tmp_path / "hf", 0)
    orbax.convert(source, tmp_path / "out", dtype="bfloat16")
    stored, cast = load_model(tmp_path / "out"), load_model(tmp_path / "out", dtype="float32")
    expected = load_model(source, dtype="bfloat16")
    assert (stored.dtype, cast.dtype) == ("bfloat16", "float32")
    for key, array in expected.params.items():
        assert stored.params[key].dtype == array.dtype
        assert cast.params[key].dtype == np.float32
        np.testing.assert_array_equal(stored.params[key], array, err_msg=key)
        np.testing.assert_array_equal(cast.params[key], array.astype(np.float32), err_msg=key)


def test_restores_sharded(checkpoint: Path) -> None:
    """Each parameter with the sharding it is asked for."""
    devices = np.array(jax.devices()[:2])
    assert len(devices) == 2  # tests/conftest.py makes four
    mesh = jax.sharding.Mesh(devices, ("tensor",))
    spec = jax.sharding.PartitionSpec
    plain = load_model(checkpoint).params
    shardings = {
        key: jax.sharding.NamedSharding(mesh, spec("tensor") if array.shape[0] % 2 == 0 else spec())
        for key, array in plain.items()
    }
    sharded = load_model(checkpoint, shardings=shardings).params
    for key, array in plain.items():
        assert sharded[key].sharding.is_equivalent_to(shardings[key], array.ndim)
        np.testing.assert_array_equal(sharded[key], array, err_msg=key)


def test_gguf_source_keeps_its_tokenizer(tmp_path: Path) -> None:
    """A checkpoint made from one file is a whole model directory."""
    pytest.importorskip("gguf")
    from hybrid_jax.tokenizer import load_tokenizer
    from tests.models.test_gguf import write_gguf

    def tokenizer(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(["a", "b", "ab", "<end>"])
        writer.add_token_types([1, 1, 1, 3])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(3)

    write_gguf(tmp_path / "model.gguf", "qwen3", extra=tokenizer)
    orbax.convert(tmp_path / "model.gguf", tmp_path / "out")
    loaded = load_tokenizer(tmp_path / "out")
    assert loaded is not None and loaded.encode("abba<end>") == [2, 1, 0, 3]
    assert load_model(tmp_path / "out").stop_ids == (3,)


def test_bad_checkpoints_say_what_is_wrong(checkpoint: Path) -> None:
    """A config that does not fit, a damaged one, a target in use, a wrong dtype."""
    with pytest.raises(ModelError, match="exists already"):
        orbax.convert(checkpoint, checkpoint.parent / "hf")
    with pytest.raises(ValueError, match="choose auto, float32"):
        load_model(checkpoint, dtype="int8")
    config = read_json(checkpoint / "config.json")
    wider = config | {"moe_intermediate_size": 64}
    (checkpoint / "config.json").write_text(json.dumps(wider))
    with pytest.raises(ModelError, match="do not fit its config.json.*has shape"):
        load_model(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(config))
    for file in (checkpoint / "orbax").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(ModelError, match="damaged"):
        load_model(checkpoint)
