"""Ranges of K and V: by the scales of checkpoints, kept by a conversion, refused by name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.errors import ModelError
from hybrid_jax.layers.mixers.attention import kv_scales
from hybrid_jax.loading import load_config, load_model, orbax
from hybrid_jax.loading.kv_ranges import (
    check_ranges,
    read_ranges,
    scaled_ranges,
    with_ranges,
    write_ranges,
)
from hybrid_jax.specs import AttentionSpec
from tests.helpers import tiny

MODEL = "lara_mini"  # linear and attention layers
NAMES = {
    "llm-compressor": ("k_scale", "v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "quark": ("k_proj.output_scale", "v_proj.output_scale"),
}


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return load_config(tiny.write_checkpoint(MODEL, tmp_path, 0))[0]


def attention(config: ModelConfig) -> dict[int, AttentionSpec]:
    mixers = enumerate(layer.mixer for layer in config.layers)
    return {i: mixer for i, mixer in mixers if isinstance(mixer, AttentionSpec)}


def scales_of(config: ModelConfig, names: tuple[str, str]) -> dict[str, np.ndarray]:
    """Another scale for every K and V, as one number or an array of one."""
    tensors = {}
    for i in attention(config):
        for n, name in enumerate(names):
            scale = np.array(0.01 * (i + 1) + 0.5 * n, np.float32)
            tensors[f"model.layers.{i}.self_attn.{name}"] = scale if n else scale[None]
    return tensors


@pytest.mark.parametrize("kind", [None, "float", "int"])
@pytest.mark.parametrize("tool", NAMES)
def test_what_is_stored_times_the_scale_of_a_checkpoint_is_the_value(
    tool: str, kind: str | None, config: ModelConfig
) -> None:
    tensors = scales_of(config, NAMES[tool])
    raw = {} if kind is None else {"quantization_config": {"kv_cache_scheme": {"type": kind}}}
    ranges = scaled_ranges(config, raw, tensors.__getitem__, tensors)
    pages = "int8" if kind == "int" else "float8_e4m3fn"
    for i, spec in attention(with_ranges(config, ranges)).items():
        expected = (tensors[f"model.layers.{i}.self_attn.{name}"] for name in NAMES[tool])
        for scale, stored in zip(kv_scales(spec, pages), expected, strict=True):
            assert scale is not None and scale.shape == (spec.num_kv_heads,)
            np.testing.assert_allclose(scale, np.broadcast_to(stored, scale.shape), rtol=1e-6)
        assert kv_scales(spec, "bfloat16") == kv_scales(spec, "uint16") == (None, None)


def test_scales_of_one_say_nothing(config: ModelConfig) -> None:
    tensors = {name: np.ones(1, np.float32) for name in scales_of(config, NAMES["quark"])}
    assert scaled_ranges(config, {}, tensors.__getitem__, tensors) == {}


def test_a_conversion_keeps_them(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(MODEL, tmp_path / "hf", 0)
    config, _ = load_config(source)
    tensors = load_file(source / "model.safetensors") | scales_of(config, NAMES["llm-compressor"])
    save_file(tensors, source / "model.safetensors")
    orbax.convert(source, tmp_path / "orbax-model")
    loaded = load_model(tmp_path / "orbax-model").config
    assert all(spec.k_range and spec.v_range for spec in attention(loaded).values())
    assert loaded == load_model(source).config
    (tmp_path / "orbax-model" / orbax.KV_RANGES).write_text("[")
    with pytest.raises(ModelError, match=r"kv_ranges\.json.*convert the checkpoint again"):
        load_model(tmp_path / "orbax-model")


def test_a_conversion_that_is_interrupted_leaves_no_model_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.write_checkpoint(MODEL, tmp_path / "hf", 0)
    tensors = load_file(source / "model.safetensors")
    save_file(
        tensors | scales_of(load_config(source)[0], NAMES["quark"]), source / "model.safetensors"
    )

    def full(target: Path, *_: object) -> None:
        assert (target / orbax.KV_RANGES).is_file() and not (target / "config.json").exists()
        raise OSError("no space left")

    monkeypatch.setattr(orbax, "save", full)
    with pytest.raises(OSError, match="no space left"):
        orbax.convert(source, tmp_path / "orbax-model")


@pytest.mark.parametrize(
    "scheme",
    [{"num_bits": 4, "type": "float"}, {"num_bits": 8, "type": "int", "symmetric": False},
     {"type": "mxfp"}],
)  # fmt: skip
def test_scales_for_other_pages_than_ours_are_not_read_as_if_they_were(
    scheme: dict[str, object], config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = scales_of(config, NAMES["quark"])
    raw = {"quantization_config": {"kv_cache_scheme": scheme}}
    assert scaled_ranges(config, raw, tensors.__getitem__, tensors) == {}
    assert f"kv_cache_scheme of config.json, {scheme}, is not one of 8 bits" in caplog.text
    for ours in ({"num_bits": 8, "type": "int", "symmetric": True}, {"symmetric": None}, None):
        raw = {"quantization_config": {"kv_cache_scheme": ours}}
        assert scaled_ranges(config, raw, tensors.__getitem__, tensors)


@pytest.mark.parametrize(
    "given",
    [None, [1.0], ["a", "b"], [1.0, 0.0], [1.0, float("nan")], [1e300, 1.0], [1, 10**400], "12",
     [True, True], 3],
)  # fmt: skip
def test_ranges_that_are_none_are_named(given: object, config: ModelConfig) -> None:
    some = attention(config)
    assert {spec.num_kv_heads for spec in some.values()} == {2}
    ranges = {str(i): {"k": [1.0, 2.0], "v": [1.0, 2.0]} for i in some}
    last = max(some)
    ranges[str(last)]["v"] = given  # type: ignore[assignment]
    with pytest.raises(ModelError, match=f"range of V in layer {last} is .*, not 2 positive"):
        with_ranges(config, ranges)
    with pytest.raises(
        ModelError, match=rf"range of V in layer {last} in 'a/r\.json' is .*, not 2"
    ):
        with_ranges(config, ranges, Path("a/r.json"))


def test_ranges_of_another_model_are_named(config: ModelConfig) -> None:
    ranges = {str(i): {"k": [1.0, 2.0], "v": [1.0, 2.0]} for i in range(len(config.layers))}
    with pytest.raises(ModelError, match="layer 0, which is no attention layer"):
        with_ranges(config, ranges)


@pytest.mark.parametrize("scale", [[0.0], [-1.0], [float("nan")], [1.0, 1.0, 1.0], []])
def test_scales_that_are_none_are_named(scale: list[float], config: ModelConfig) -> None:
    tensors = scales_of(config, NAMES["quark"])
    name = list(tensors)[-1]
    tensors[name] = np.array(scale, np.float32)
    with pytest.raises(ModelError, match=f"{name} is .*, neither one positive number nor 2"):
        scaled_ranges(config, {"quantization_config": "fp8"}, tensors.__getitem__, tensors)


def test_ranges_are_those_of_the_file(config: ModelConfig, tmp_path: Path) -> None:
    ranges = {str(i): {"k": [1.0, 2.0], "v": [1.0, 2.0]} for i in attention(config)}
    write_ranges(tmp_path / "r.json", ranges)
    check_ranges(with_ranges(config, ranges), "int8", str(tmp_path / "r.json"))
    with pytest.raises(ValueError, match=r"loaded with other ranges.*r\.json"):
        check_ranges(config, "fp8", str(tmp_path / "r.json"))


def test_ranges_for_pages_that_need_none_are_refused() -> None:
    with pytest.raises(ValueError, match="'r.json' are for kv_dtype fp8 or int8, not for auto"):
        EngineConfig(kv_ranges="r.json")


@pytest.mark.parametrize(("text", "what"), [(None, "no file"), ("{}", "empty"), ("[", "JSON")])
def test_files_that_are_none_are_named(text: str | None, what: str, tmp_path: Path) -> None:
    path = tmp_path / "ranges.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModelError, match=rf"ranges\.json.*{what}.*; write it with.*calibrate_kv"):
        read_ranges(path)


def test_specs_differ_by_their_ranges_only(config: ModelConfig) -> None:
    ranges = {str(i): {"k": [1.0, 2.0], "v": [3.0, 4.0]} for i in attention(config)}
    for i, spec in attention(with_ranges(config, ranges)).items():
        assert (spec.k_range, spec.v_range) == ((1.0, 2.0), (3.0, 4.0))
        assert replace(spec, k_range=None, v_range=None) == attention(config)[i]
