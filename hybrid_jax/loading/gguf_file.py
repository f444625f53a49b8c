"""The GGUF container: metadata, and tensors dequantised one at a time from a memory map.

The `gguf` package knows the quantisation formats. Its reader makes several Python objects per array
element, which takes twenty seconds for a vocabulary of 262,144 tokens; this one takes under one.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from hybrid_jax.errors import ModelError

# Of the value types of the format: 8 is a string, 9 an array, the rest are these.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}
_CHUNK = 1 << 20  # elements dequantised at a time: bounds the temporaries of the gguf package


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in the file. `shape` is in row-major order, as NumPy has it."""

    shape: tuple[int, ...]
    type_name: str
    start: int
    nbytes: int


class GGUFFile:
    """One GGUF file, version 2 or 3: `metadata` (key -> value) and `tensors` (name -> entry).

    Array values are NumPy arrays, or lists of strings.

    Raises:
        ModelError: not a GGUF file, truncated, or the `gguf` package is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = _import_gguf()
        try:
            self._data = np.memmap(path, np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelError(
                f"{str(path)!r} cannot be read ({error}); download it again"
            ) from error
        cursor = _Cursor(path, self._data.data)
        if cursor.take("4s") != b"GGUF":
            raise ModelError(f"{str(path)!r} is not a GGUF file; give one, or a directory")
        version = cursor.take("I")
        if version not in (2, 3):
            raise ModelError(
                f"{str(path)!r} has GGUF version {version} or big-endian numbers; "
                "only little-endian versions 2 and 3 are supported"
            )
        tensor_count, value_count = cursor.take("Q"), cursor.take("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(value_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.take("I"))
        self.tensors = self._read_tensors(cursor, tensor_count)

    def get(self, name: str) -> np.ndarray:
        """One tensor: a view for float types, a new float32 array for quantised ones.

        Raises:
            ModelError: the tensor's type cannot be dequantised.
        """
        entry = self.tensors[name]
        data = self._data[entry.start : entry.start + entry.nbytes]
        if entry.type_name in _PLAIN:
            return data.view(_PLAIN[entry.type_name]).reshape(entry.shape)
        kind = self._gguf.GGMLQuantizationType[entry.type_name]
        block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        out = np.empty(math.prod(entry.shape), np.float32)
        step = max(1, _CHUNK // block)
        for first in range(0, entry.nbytes // block_bytes, step):
            part = data[first * block_bytes : (first + step) * block_bytes]
            try:
                # One long row: the package loops in Python over short ones.
                values = self._gguf.dequantize(part[None], kind)[0]
            except NotImplementedError as error:
                raise ModelError(
                    f"tensor {name!r} has type {entry.type_name}, which is not supported"
                ) from error
            out[first * block : first * block + values.size] = values
        return out.reshape(entry.shape)

    def _read_tensors(self, cursor: "_Cursor", count: int) -> dict[str, TensorEntry]:
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name, dims = cursor.string(), cursor.take("I")
            shape = tuple(cursor.take("Q") for _ in range(dims))[::-1]
            found[name] = shape, cursor.take("I"), cursor.take("Q")
        alignment = int(self.metadata.get("general.alignment", 32))
        base = -(-cursor.position // alignment) * alignment
        return {name: self._entry(name, base, *where) for name, where in found.items()}

    def _entry(
        self, name: str, base: int, shape: tuple[int, ...], kind: int, offset: int
    ) -> TensorEntry:
        try:
            quantization = self._gguf.GGMLQuantizationType(kind)
        except ValueError as error:
            raise ModelError(
                f"tensor {name!r} has GGUF type {kind}, which the installed gguf package does not "
                "know; upgrade it"
            ) from error
        block, block_bytes = self._gguf.GGML_QUANT_SIZES[quantization]
        nbytes = math.prod(shape) // block * block_bytes
        if base + offset + nbytes > self._data.size:
            raise _truncated(self.path, f"tensor {name!r} ends past the end of the file")
        return TensorEntry(shape, quantization.name, base + offset, nbytes)


class _Cursor:
    """Reads values one after the other and refuses to run past the end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.position = path, data, 0

    def take(self, code: str) -> Any:
        """One scalar, by its struct code."""
        try:
            (value,) = struct.unpack_from("<" + code, self.data, self.position)
        except struct.error as error:
            raise _truncated(self.path, "the header ends early") from error
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        """A string with its length before it."""
        return str(self._bytes(self.take("Q")), "utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A value of the given type: scalar, string or array."""
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ModelError(
                f"{str(self.path)!r} has a value of unknown type {kind}; is it damaged?"
            )
        kind, count = self.take("I"), self.take("Q")
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[kind])
            return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)
        return [self.value(kind) for _ in range(count)]

    def _bytes(self, count: int) -> memoryview:
        if self.position + count > len(self.data):
            raise _truncated(self.path, "the header ends early")
        self.position += count
        return self.data[self.position - count : self.position]


def _truncated(path: Path, detail: str) -> ModelError:
    return ModelError(f"{str(path)!r} is truncated ({detail}); download it again")


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ModelError(
            'GGUF files need the gguf package; run pip install "hybrid-jax[gguf]"'
        ) from error
    return gguf
