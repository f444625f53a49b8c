"""The largest |K| and |V| of every KV head: from the scales in a checkpoint, or from a file.

Checkpoints that were calibrated for K and V of 8 bits have one scale for all heads of a layer, and
what is stored times the scale is the value. Their names differ by the tool that made them.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_jax.config import ModelConfig
from hybrid_jax.errors import ModelError
from hybrid_jax.fields import shown
from hybrid_jax.loading.hf import read_json
from hybrid_jax.specs import AttentionSpec
from pallas_kernels.storage import FLOAT8, INT8, LARGEST

logger = logging.getLogger(__name__)

CALIBRATE = "write it with hybrid_jax.calibrate_kv"

Ranges = Mapping[str, Mapping[str, list[float]]]
"""Index of a layer -> "k" and "v" -> a positive number for each KV head."""
# Of llm-compressor and vLLM, of ModelOpt, and of older compressed-tensors and Quark.
_NAMES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale")
SCALES = tuple(
    f"model.layers.*.self_attn.{name.format(which)}" for name in _NAMES for which in "kv"
)


def with_ranges(config: ModelConfig, ranges: Ranges, file: Path | None = None) -> ModelConfig:
    """The model with the ranges of K and V in the specs of its attention layers, if there are any.

    Args:
        config: the model. ranges: of its layers. file: where they are from, for errors.

    Raises:
        ModelError: a layer has none, or not one positive number per KV head, or is none.
    """
    where = f" in {str(file)!r}" if file else ""
    if not ranges:
        return config
    attention = {str(i) for i, x in enumerate(config.layers) if isinstance(x.mixer, AttentionSpec)}
    if unknown := sorted(set(ranges) - attention):
        raise ModelError(
            f"there are ranges of K and V for layer {unknown[0]}{where}, which is no attention "
            "layer of this model; measure its own with hybrid_jax.calibrate_kv"
        )
    layers = []
    for i, layer in enumerate(config.layers):
        if isinstance(layer.mixer, AttentionSpec):
            heads = layer.mixer.num_kv_heads
            k, v = (_checked(ranges, i, which, heads, where) for which in "kv")
            layer = replace(layer, mixer=replace(layer.mixer, k_range=k, v_range=v))
        layers.append(layer)
    return replace(config, layers=tuple(layers))


def ranges_of(config: ModelConfig) -> dict[str, dict[str, list[float]]]:
    """What `with_ranges` was given; empty if nothing."""
    mixers = enumerate(layer.mixer for layer in config.layers)
    return {
        str(i): {"k": list(mixer.k_range), "v": list(mixer.v_range)}
        for i, mixer in mixers
        if isinstance(mixer, AttentionSpec) and mixer.k_range and mixer.v_range
    }


def check_ranges(config: ModelConfig, kv_dtype: str, kv_ranges: str) -> None:
    """Checks that a model was loaded with the ranges that its pages need.

    Raises:
        ValueError: pages are int8 and ranges unknown, or the model has others than the file.
        ModelError: `kv_ranges` is given and is no such file.
    """
    attention = any(isinstance(layer.mixer, AttentionSpec) for layer in config.layers)
    if kv_dtype == "int8" and attention and not ranges_of(config):
        raise ValueError(
            f"kv_dtype {kv_dtype} needs the ranges of K and V, and the model was loaded without "
            "any; measure them with hybrid_jax.calibrate_kv and give LLM or load_model the file as "
            "kv_ranges"
        )
    file = Path(kv_ranges)
    if kv_ranges and with_ranges(config, read_ranges(file), file) != config:
        raise ValueError(
            f"the model was loaded with other ranges than those of kv_ranges {kv_ranges!r}; give "
            "load_model the same file"
        )


def scaled_ranges(
    config: ModelConfig,
    raw: Mapping[str, Any],
    get: Callable[[str], np.ndarray],
    names: Collection[str],
) -> Ranges:
    """Ranges by the scales of a checkpoint; empty if it has none, or only the default of 1.

    Scales for anything but symmetric pages of 8 bits are left out, with a line in the log.

    Args:
        config: the model. raw: config.json, which says what the scales are for.
        get: reads a tensor. names: of all of them.

    Raises:
        ModelError: a scale is neither one positive number nor one per KV head.
    """
    largest = _largest(raw)
    if largest is None:
        return {}

    def scale(i: int, which: str, heads: int) -> np.ndarray:
        candidates = (f"model.layers.{i}.self_attn.{name.format(which)}" for name in _NAMES)
        name = next((name for name in candidates if name in names), None)
        if name is None:
            return np.ones(heads)
        found = np.asarray(get(name), np.float64).reshape(-1)
        if found.size not in (1, heads) or not all(_is_range(x) for x in found):
            raise ModelError(
                f"{name} is {shown(found.tolist())}, neither one positive number nor {heads}; give "
                "kv_ranges, a file of hybrid_jax.calibrate_kv"
            )
        return np.broadcast_to(found, heads)

    scales = {
        str(i): {which: scale(i, which, layer.mixer.num_kv_heads) for which in "kv"}
        for i, layer in enumerate(config.layers)
        if isinstance(layer.mixer, AttentionSpec)
    }
    if all((scale == 1.0).all() for pair in scales.values() for scale in pair.values()):
        return {}
    return {
        i: {which: (largest * scale).tolist() for which, scale in pair.items()}
        for i, pair in scales.items()
    }


def _largest(raw: Mapping[str, Any]) -> float | None:
    """The largest value that is stored for K and V by config.json; None: there is no such page."""
    quantization = raw.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    scheme = scheme if isinstance(scheme, Mapping) else {}
    dtype = {"float": FLOAT8, "int": INT8}.get(scheme.get("type", "float"))
    symmetric = scheme.get("symmetric") is not False
    if dtype is None or scheme.get("num_bits", 8) != 8 or not symmetric:
        logger.warning(
            "the kv_cache_scheme of config.json, %s, is not one of 8 bits, float or int, around "
            "zero, so its scales are not used; for kv_dtype int8 or fp8 measure ranges of K and V "
            "with hybrid_jax.calibrate_kv",
            shown(dict(scheme)),
        )
        return None
    return LARGEST[dtype]


def read_ranges(path: Path, remedy: str = CALIBRATE) -> Ranges:
    """What `write_ranges` wrote; `remedy` says what to do if it did not.

    Raises:
        ModelError: it is no such file.
    """
    if not path.is_file():
        raise ModelError(f"kv_ranges {str(path)!r} is no file; {remedy}")
    ranges = read_json(path, remedy)
    if not ranges:
        raise ModelError(f"kv_ranges {str(path)!r} is empty; {remedy}")
    return ranges


def write_ranges(path: Path, ranges: Ranges) -> None:
    """Writes a JSON file."""
    path.write_text(json.dumps(ranges, indent=1) + "\n")


def _checked(ranges: Ranges, layer: int, which: str, heads: int, where: str) -> tuple[float, ...]:
    pair = ranges.get(str(layer))
    given = pair.get(which) if isinstance(pair, Mapping) else None
    if not isinstance(given, list) or len(given) != heads or not all(map(_is_range, given)):
        raise ModelError(
            f"the range of {which.upper()} in layer {layer}{where} is {shown(given)}, not {heads} "
            "positive numbers; measure it with hybrid_jax.calibrate_kv"
        )
    return tuple(map(float, given))


def _is_range(value: object) -> bool:
    """Whether it is a positive number, far from where float32 ends."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 1e-30 < value < 1e30
