"""What another implementation makes of some prompts, in a file: needs no torch to be read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hybrid_jax.errors import ReferenceFileError
from hybrid_jax.fields import choice
from hybrid_jax.loading import DTYPES

VERSION = "1"


@dataclass(frozen=True, eq=False)
class RecordedPrompt:
    """One prompt of T tokens. L layers, D hidden size, V vocabulary."""

    prompt: np.ndarray  # i32[T]
    tokens: np.ndarray  # i32[N]: its greedy continuation, past any end-of-sequence token
    logits: np.ndarray  # f32[V]: of the first of `tokens`
    positions: np.ndarray  # i32[P], ascending: where hidden states were recorded
    hidden: np.ndarray  # f32[L + 1, P, D]: after 0, 1, ... layers, before any final norm


@dataclass(frozen=True, eq=False)
class Reference:
    """What was recorded, of which model and by what."""

    config: Mapping[str, Any]  # config.json
    dtype: str  # of the weights and activations it was computed with
    made_by: str
    prompts: tuple[RecordedPrompt, ...]

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file: "<prompt>.<field>" of `RecordedPrompt`."""
        arrays = {
            f"{i}.{field.name}": np.ascontiguousarray(getattr(prompt, field.name))
            for i, prompt in enumerate(self.prompts)
            for field in fields(RecordedPrompt)
        }
        metadata = {
            "reference": VERSION,
            "config": json.dumps(dict(self.config)),
            "dtype": self.dtype,
            "made_by": self.made_by,
        }
        save_file(arrays, path, metadata)

    @classmethod
    def load(cls, path: str | Path) -> "Reference":
        """Reads what `save` wrote.

        Raises:
            ReferenceFileError: it is no reference, or one of another version, or damaged.
        """
        remedy = "record it again with `hybrid-jax check record-reference`"
        try:
            with safe_open(path, "numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (AttributeError, OSError, SafetensorError, ValueError) as error:
            # The first for a dtype, the last for a shape, that numpy does not have.
            raise ReferenceFileError(
                f"{str(path)!r} cannot be read as a reference ({error}); {remedy}"
            ) from error
        if metadata.get("reference") != VERSION:
            raise ReferenceFileError(
                f"{str(path)!r} is no reference of version {VERSION} (it says "
                f"{metadata.get('reference')!r}); {remedy}"
            )
        names = [field.name for field in fields(RecordedPrompt)]
        try:
            prompts = [
                RecordedPrompt(**{name: arrays[f"{i}.{name}"] for name in names})
                for i in range(len(arrays) // len(names))
            ]
            config = json.loads(metadata["config"])
            reference = cls(config, metadata["dtype"], metadata["made_by"], tuple(prompts))
            _check(reference)
            return reference
        except (KeyError, ValueError) as error:
            raise ReferenceFileError(
                f"{str(path)!r} is a damaged reference ({error!r}); {remedy}"
            ) from error


def _check(reference: Reference) -> None:
    """Raises ValueError unless everything is as `RecordedPrompt` says."""
    choice(DTYPES)("dtype", reference.dtype)
    if not isinstance(reference.config, dict) or not reference.prompts:
        raise ValueError("it has no config.json or no prompts")
    for i, recorded in enumerate(reference.prompts):
        ids = (recorded.prompt, recorded.tokens, recorded.positions)
        floats = (recorded.logits, recorded.hidden)
        if (
            any(array.dtype != np.int32 or array.ndim != 1 or not array.size for array in ids)
            or any(array.dtype != np.float32 for array in floats)
            or (recorded.logits.ndim, recorded.hidden.ndim) != (1, 3)
            or recorded.hidden.shape[1] != recorded.positions.size
        ):
            raise ValueError(f"a dtype or shape of prompt {i}")
        if (
            min(array.min() for array in ids) < 0
            or max(array.max() for array in ids[:2]) >= recorded.logits.size
            or recorded.positions.max() >= recorded.prompt.size
        ):
            raise ValueError(f"a token or position of prompt {i}")
