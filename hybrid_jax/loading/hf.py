"""Hugging Face directories: config.json and memory-mapped safetensors, sharded or not."""

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hybrid_jax.errors import ModelError
from hybrid_jax.fields import reason

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}


def read_json(path: Path, remedy: str = "copy it again") -> dict[str, Any]:
    """A JSON object from a file; `remedy` says what to do if it holds none.

    Raises:
        ModelError: the file is missing or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(
            f"{str(path.parent)!r} is not a model directory: it has no {path.name}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{str(path)!r} is not readable as JSON ({reason(error)}); {remedy}"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{str(path)!r} holds no JSON object; {remedy}")
    return value


class SafetensorsFile:
    """One file: its header is parsed here, its data stay in a read-only memory map."""

    def __init__(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= size - 8:
                    raise ModelError(_truncated(path, f"its header says {length} bytes of {size}"))
                header = json.loads(file.read(length))
        except FileNotFoundError as error:
            raise ModelError(f"{str(path)!r} is missing; download the checkpoint again") from error
        except ModelError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(_truncated(path, reason(error))) from error
        try:
            header.pop("__metadata__", None)
            for name, entry in header.items():
                _check_entry(name, entry)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(_truncated(path, f"bad header: {error}")) from error
        self.entries = header
        if 8 + length + end > size:
            raise ModelError(_truncated(path, f"{8 + length + end} bytes expected, {size} found"))
        self._data = np.memmap(path, np.uint8, mode="r", offset=8 + length) if end else None

    def get(self, name: str) -> np.ndarray:
        """A view of one tensor."""
        entry = self.entries[name]
        if entry["dtype"] not in DTYPES:
            raise ModelError(f"tensor {name!r} has dtype {entry['dtype']}, which is not supported")
        start, stop = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        if self._data is None or start == stop:
            return np.zeros(entry["shape"], dtype)
        return np.ndarray(entry["shape"], dtype, self._data[start:stop].data)


class HFSource:
    """A `TensorSource` over a directory with config.json and *.safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config = read_json(path / "config.json")
        index = path / "model.safetensors.index.json"
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ModelError(f"{str(index)!r} has no weight_map; download it again")
            files = sorted({str(file) for file in weight_map.values()})
        else:
            files = sorted(file.name for file in path.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{str(path)!r} has no *.safetensors; convert the checkpoint to them")
        self._where: dict[str, SafetensorsFile] = {}
        for file in files:
            shard = SafetensorsFile(path / file)
            twice = sorted(self._where.keys() & shard.entries.keys())
            if twice:
                raise ModelError(
                    f"tensor {twice[0]!r} is in {file} and in another file; remove one"
                )
            self._where |= dict.fromkeys(shard.entries, shard)

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        return self._config

    def names(self) -> Collection[str]:
        """Hub names of all tensors of all shards."""
        return self._where.keys()

    def get(self, name: str) -> np.ndarray:
        """A view into the memory map."""
        return self._where[name].get(name)


def _check_entry(name: str, entry: dict[str, Any]) -> None:
    start, stop = entry["data_offsets"]
    if entry["dtype"] in DTYPES:
        size = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
        if stop - start != size:
            raise ValueError(f"{name} has {stop - start} bytes for {size}")


def _truncated(path: Path, detail: str) -> str:
    return f"{str(path)!r} is truncated or not a safetensors file ({detail}); download it again"
