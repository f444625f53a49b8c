"""From a path to a model in memory: Hugging Face directories, GGUF files and Orbax checkpoints."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import ModelConfig
from hybrid_jax.errors import ModelError
from hybrid_jax.fields import choice, shown
from hybrid_jax.loading.hf import HFSource, read_json
from hybrid_jax.loading.kv_ranges import SCALES, read_ranges, scaled_ranges, with_ranges
from hybrid_jax.loading.source import TensorSource
from hybrid_jax.models import config_from_hf, family
from hybrid_jax.models.decoder import Params, abstract_params
from hybrid_jax.models.hf_config import text_config
from hybrid_jax.models.hf_fields import checked
from hybrid_jax.models.weights import apply_rules, check_layer_map

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
check_dtype = choice(("auto", *DTYPES))


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory.

    `graph` is the nnx graph that `models.decoder.bind` joins with `params`. `source` is where the
    tokenizer is looked for. `stop_ids` are config.json's and generation_config.json's EOS ids.
    """

    config: ModelConfig
    graph: Any
    params: Params
    dtype: str
    source: Path
    stop_ids: tuple[int, ...]


def model_path(path: str | Path) -> Path:
    """The path to a model.

    Raises:
        ModelError: it is no path.
    """
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ModelError(f"the model is {shown(path)}; give a model directory or a .gguf file")
    return Path(path)


def open_source(path: Path) -> TensorSource:
    """The tensor source for a directory or a .gguf file.

    Raises:
        ModelError: the path is neither.
    """
    if path.is_dir():
        return HFSource(path)
    if path.suffix == ".gguf":
        from hybrid_jax.loading.gguf import GGUFSource

        return GGUFSource(path)
    if path.exists():
        raise ModelError(f"{str(path)!r} is neither a model directory nor a .gguf file")
    raise ModelError(f"{str(path)!r} does not exist; give a model directory or a .gguf file")


def load_config(path: str | Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The `ModelConfig` of a directory, GGUF file or config.json, and the raw config."""
    path = model_path(path)
    if path.is_dir() or path.suffix == ".json":
        raw = read_json(path / "config.json" if path.is_dir() else path)
    else:
        raw = open_source(path).config()
    return config_from_hf(raw), raw


def verify_layer_map(path: str | Path, config: ModelConfig) -> None:
    """Holds the layer map against the names of the checkpoint's tensors, if it has safetensors.

    Raises:
        ModelError: naming every layer whose kind contradicts its tensors.
    """
    path = model_path(path)
    if path.suffix != ".json" and (path.is_file() or any(path.glob("*.safetensors"))):
        check_layer_map(config, _original_names(config, open_source(path)))


def _original_names(config: ModelConfig, source: TensorSource) -> dict[str, str]:
    """The name in `source` of every tensor, by its hub name: families may rename."""
    rename = getattr(family(config.model_type), "rename", lambda name: name)
    return {rename(name): name for name in source.names()}


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
    kv_ranges: str | Path = "",
) -> LoadedModel:
    """Loads a checkpoint.

    Args:
        path: a Hugging Face directory, an Orbax checkpoint made by `hybrid-jax convert`, or a GGUF
            file.
        dtype: of the weights and activations: float32, bfloat16, float16, or auto (the
            checkpoint's).
        shardings: parameter path -> sharding; one device when absent.
        kv_ranges: a file of `calibrate_kv`; empty: what the checkpoint says, if anything.

    Raises:
        ModelError: anything about the checkpoint that does not fit, in one message.
    """
    path = model_path(path)
    if (path / "orbax").is_dir():
        from hybrid_jax.loading import orbax

        return orbax.load(path, dtype=dtype, shardings=shardings, kv_ranges=kv_ranges)
    source = open_source(path)
    raw = source.config()
    config = config_from_hf(raw)
    module = family(config.model_type)
    original = _original_names(config, source)
    ignored = (*module.IGNORED, "*.rotary_emb.inv_freq", *SCALES)
    if config.tie_word_embeddings:
        ignored = (*ignored, "lm_head.weight")
    check_layer_map(config, original)
    get = lambda hub: source.get(original[hub])  # noqa: E731
    file = Path(kv_ranges) if kv_ranges else None
    ranges = read_ranges(file) if file else scaled_ranges(config, raw, get, original)
    config = with_ranges(config, ranges, file)
    name = resolve_dtype(dtype, raw, source)
    graph, shapes, _ = abstract_params(config, DTYPES[name])

    def put(target: str, array: np.ndarray) -> jax.Array:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ModelError(
                f"{target} is made of {array.dtype} weights; only floats are supported"
            )
        cast = np.asarray(array).astype(shapes[target].dtype, copy=False)
        return jax.device_put(cast, shardings[target] if shardings else None)

    params = apply_rules(
        module.weight_rules(config, original),
        get,
        original,
        shapes,
        put,
        ignored,
    )
    return LoadedModel(config, graph, params, name, path, stop_ids(config, path))


def resolve_dtype(dtype: str, raw: Mapping[str, Any], source: TensorSource) -> str:
    """The dtype's name; `auto` takes config.json's, or else that of the embedding on disk.

    Raises:
        ValueError: an unknown dtype. ModelError: the checkpoint's is none of ours.
    """
    check_dtype("dtype", dtype)
    if dtype == "auto":
        dtype = _stated_dtype(raw)
        if dtype not in DTYPES:
            embeddings = [name for name in source.names() if name.endswith("embed_tokens.weight")]
            dtype = str(source.get(embeddings[0]).dtype) if embeddings else "float32"
    if dtype not in DTYPES:
        raise ModelError(f"the weights are {dtype}; choose a dtype of {', '.join(DTYPES)}")
    return dtype


def config_dtype(dtype: str, raw: Mapping[str, Any]) -> str:
    """The dtype's name, without looking at weights; `auto`: config.json's, or else bfloat16.

    Raises:
        ValueError: an unknown dtype.
    """
    check_dtype("dtype", dtype)
    if dtype == "auto":
        stated = _stated_dtype(raw)
        return stated if stated in DTYPES else "bfloat16"
    return dtype


def _stated_dtype(raw: Mapping[str, Any]) -> str:
    text = text_config(raw)
    stated = text.get("dtype") or text.get("torch_dtype") or raw.get("dtype")
    return str(stated or raw.get("torch_dtype") or "").removeprefix("torch.")


def stop_ids(config: ModelConfig, path: Path) -> tuple[int, ...]:
    """EOS ids of the config and of generation_config.json (chat models often add one there)."""
    extra: dict[str, Any] = {}
    if (path / "generation_config.json").is_file():
        given = read_json(path / "generation_config.json").get("eos_token_id")
        extra = checked({"eos_token_id": given}, "generation_config.json")
    return tuple(dict.fromkeys((*config.eos_token_ids, *extra.get("eos_token_id", ()))))
