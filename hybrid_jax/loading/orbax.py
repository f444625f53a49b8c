"""Orbax checkpoints: parameters as the decoder uses them, restored straight onto their devices.

A checkpoint is a model directory whose weights lie in `orbax/` instead of in safetensors files;
config.json, generation_config.json and the tokenizer's files are those of Hugging Face.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from hybrid_jax.errors import ModelError
from hybrid_jax.loading import (
    DTYPES,
    LoadedModel,
    check_dtype,
    load_config,
    load_model,
    stop_ids,
)
from hybrid_jax.loading.hf import read_json
from hybrid_jax.loading.kv_ranges import (
    CALIBRATE,
    ranges_of,
    read_ranges,
    with_ranges,
    write_ranges,
)
from hybrid_jax.models import config_from_hf
from hybrid_jax.models.decoder import Params, abstract_params

WEIGHTS = "orbax"
KV_RANGES = "kv_ranges.json"  # of what the checkpoint had as scales
COPIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def convert(source: Path, target: Path, *, dtype: str = "auto") -> None:
    """Writes the model at `source`, any path that `load_model` takes, as an Orbax checkpoint.

    Raises:
        ModelError: `source` is no model, or `target` exists and is not an empty directory.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelError(f"{str(target)!r} exists already; give a new directory")
    loaded = load_model(source, dtype=dtype)
    _, raw = load_config(source)
    for part in (raw, raw.get("text_config")):
        if isinstance(part, dict):
            part["dtype"] = loaded.dtype
    target.mkdir(parents=True, exist_ok=True)
    if ranges := ranges_of(loaded.config):
        write_ranges(target / KV_RANGES, ranges)
    if source.is_file():
        from hybrid_jax.loading.gguf import GGUFSource

        tokenizer = GGUFSource(source).tokenizer()
        if tokenizer is not None:
            tokenizer.save_pretrained(target)
    save(target, raw, loaded.params, (source / name for name in COPIED))


def save(
    target: Path, config: Mapping[str, Any], params: Params, files: Iterable[Path] = ()
) -> None:
    """Writes a checkpoint: parameters (by shard), config.json, and copies of what `files` exist."""
    target.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(_weights(target), dict(params))
    for file in files:
        if file.is_file():
            shutil.copy(file, target / file.name)
    # Last, since a directory without it is not a model: an interrupted save leaves no half model.
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(
    path: Path,
    *,
    dtype: str = "auto",
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
    kv_ranges: str | Path = "",
) -> LoadedModel:
    """Restores a checkpoint, each device reading its own shards. Arguments as in `load_model`.

    Raises:
        ModelError: the weights are damaged or do not fit config.json.
        ValueError: an unknown dtype.
    """
    raw = read_json(path / "config.json")
    file = Path(kv_ranges or path / KV_RANGES)
    remedy = CALIBRATE if kv_ranges else "convert the checkpoint again"
    ranges = read_ranges(file, remedy) if kv_ranges or file.exists() else {}
    config = with_ranges(config_from_hf(raw), ranges, file)
    name = check_dtype("dtype", dtype)
    if name == "auto":
        name = check_dtype("dtype of config.json", (raw.get("text_config") or raw).get("dtype"))
    graph, shapes, _ = abstract_params(config, DTYPES[name])
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        key: jax.ShapeDtypeStruct(
            shape.shape, shape.dtype, sharding=shardings[key] if shardings else device
        )
        for key, shape in shapes.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = dict(checkpointer.metadata(_weights(path)).item_metadata)
            _check(path, stored, wanted)
            params = checkpointer.restore(_weights(path), wanted)
        except (OSError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(
                f"the Orbax checkpoint {str(path)!r} is damaged ({error}); convert it again"
            ) from error
    return LoadedModel(config, graph, params, name, path, stop_ids(config, path))


def _check(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    problems = [f"missing {key}" for key in wanted.keys() - stored.keys()]
    problems += [f"unknown {key}" for key in stored.keys() - wanted.keys()]
    problems += [
        f"{key} has shape {tuple(stored[key].shape)}, not {wanted[key].shape}"
        for key in wanted.keys() & stored.keys()
        if tuple(stored[key].shape) != wanted[key].shape
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:10])
        raise ModelError(
            f"the weights of {str(path)!r} do not fit its config.json ({shown}); convert it again"
        )


def _weights(path: Path) -> Path:
    return path.resolve() / WEIGHTS  # Orbax takes absolute paths only
