"""Computed tokens on the host or in a file: what a sequence's pages and slots hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hybrid_jax.errors import SnapshotError
from hybrid_jax.specs import CacheGroup
from pallas_kernels.storage import FLOAT8

VERSION = "1"
_TOKENS = "token_ids"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The caches after the first `length` of `token_ids`, as numpy arrays.

    `arrays` maps "<layer>.<name>" to what the pages (in order; of a window layer only the last
    ones) or the slot of a layer hold: [pages or 1, ...] in the dtype of the values; float8 may be
    its bits, uint8.
    """

    token_ids: tuple[int, ...]
    length: int  # tokens computed; the last token sampled is not, usually
    model: str  # fingerprint of the parameters and the configuration they were computed with
    page_size: int
    arrays: Mapping[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def count(self, group: CacheGroup) -> int:
        """Pages or slots of one cache group."""
        layer = f"{group.layers[0]}."
        return next(len(array) for name, array in self.arrays.items() if name.startswith(layer))

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file."""
        tokens = np.array(self.token_ids, np.int32)
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        for name, array in arrays.items():
            if array.dtype == FLOAT8:  # which safetensors writes and cannot read
                arrays[name] = array.view(np.uint8)
        metadata = {
            "version": VERSION,
            "model": self.model,
            "length": str(self.length),
            "page_size": str(self.page_size),
        }
        save_file({_TOKENS: tokens, **arrays}, path, metadata)

    @classmethod
    def load(cls, path: str | Path) -> "Snapshot":
        """Reads what `save` wrote.

        Raises:
            SnapshotError: it is no snapshot, or one of another version, or damaged.
        """
        try:
            with safe_open(path, "numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (AttributeError, OSError, SafetensorError, ValueError) as error:
            # The first for a dtype, the last for a shape, that numpy does not have.
            raise SnapshotError(f"{path} cannot be read as a snapshot: {error}") from error
        if metadata.get("version") != VERSION or _TOKENS not in arrays:
            raise SnapshotError(
                f"{path} is no snapshot of version {VERSION} (it says "
                f"{metadata.get('version')!r}); make it again with this version of hybrid-jax"
            )
        try:
            tokens = tuple(arrays.pop(_TOKENS).astype(np.int32).reshape(-1).tolist())
            length, page_size = int(metadata["length"]), int(metadata["page_size"])
            return cls(tokens, length, metadata["model"], page_size, arrays)
        except (KeyError, ValueError) as error:
            raise SnapshotError(f"{path} is a damaged snapshot: {error!r}") from error
