"""Computed tokens on the host or in a file: what a sequence's pages and slots hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hybrid_jax.cache.plan import first_live_page, pages_for
from hybrid_jax.errors import SnapshotError
from hybrid_jax.specs import CacheGroup, StateSpec, WindowSpec
from pallas_kernels.storage import FLOAT8

VERSION = "1"
_TOKENS = "token_ids"
_DAMAGED = "it is damaged, make it again"


class CacheReader(Protocol):
    """What a snapshot has to fit: the runner of an engine or of a workspace."""

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups."""
        ...

    @property
    def fingerprint(self) -> str:
        """Names parameters, configuration and dtypes."""
        ...

    def read(self, group: int, ids: Sequence[int]) -> dict[str, np.ndarray]:
        """What pages or slots hold: "<layer>.<name>" -> [ids, ...]."""
        ...


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

    def check(self, runner: CacheReader, page_size: int) -> list[int]:
        """Pages or slots per cache group, if `runner` could hold them.

        Raises:
            SnapshotError: it is of another model, dtype or page size, or damaged.
        """
        if self.model != runner.fingerprint:
            raise SnapshotError(
                "the snapshot was made by other weights, another configuration or another dtype; "
                "restore it with the model that made it"
            )
        if self.page_size != page_size:
            raise SnapshotError(
                f"the snapshot has pages of {self.page_size} tokens and the caches here of "
                f"{page_size}; restore it with page_size={self.page_size}"
            )
        if not 0 < self.length <= len(self.token_ids):
            raise SnapshotError(
                f"the snapshot has {len(self.token_ids)} tokens and says that {self.length} are "
                f"computed; {_DAMAGED}"
            )
        return [self._count(g, group, runner) for g, group in enumerate(runner.groups)]

    def _count(self, g: int, group: CacheGroup, runner: CacheReader) -> int:
        spec, most = group.spec, pages_for(self.length, self.page_size)
        least = most
        if isinstance(spec, WindowSpec):
            least -= first_live_page(self.length, spec.window, self.page_size)
        elif isinstance(spec, StateSpec):
            least = most = 1
        counts = set[int]()
        for name, like in runner.read(g, [0]).items():
            array = self.arrays.get(name)
            if array is not None and like.dtype == FLOAT8 and array.dtype == np.uint8:
                array = array.view(FLOAT8)  # a file has its bits
            if array is None or (array.dtype, array.shape[1:]) != (like.dtype, like.shape[1:]):
                what = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
                raise SnapshotError(f"the snapshot's {name} is {what}; {_DAMAGED}")
            counts.add(len(array))
        if len(counts) != 1 or not least <= min(counts) <= most:
            raise SnapshotError(
                f"the snapshot has {sorted(counts)} pages or slots in cache group {g} and "
                f"{self.length} tokens need {least} to {most}; {_DAMAGED}"
            )
        return counts.pop()

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
