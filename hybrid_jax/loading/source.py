"""Where tensors come from: one interface over safetensors directories and GGUF files."""

from collections.abc import Collection
from typing import Any, Protocol

import numpy as np


class TensorSource(Protocol):
    """A checkpoint that is read one tensor at a time."""

    def config(self) -> dict[str, Any]:
        """The contents of config.json, or its equivalent."""
        ...

    def names(self) -> Collection[str]:
        """Hub names of all tensors."""
        ...

    def get(self, name: str) -> np.ndarray:
        """One tensor, by hub name; a view into the memory map where the format allows."""
        ...
