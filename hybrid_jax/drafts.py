"""Guesses at what comes next, for speculative decoding: made cheaply, verified by the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Drafter(Protocol):
    """Guesses what comes next."""

    def __call__(self, token_ids: Sequence[int], count: int) -> list[int]:
        """At most `count` guesses at the tokens after `token_ids`."""
        ...


@dataclass(frozen=True)
class PromptLookup:
    """Guesses that what followed the last tokens before, the last time they came, follows again."""

    longest: int = 3  # tokens that must be equal, if possible
    shortest: int = 1

    def __call__(self, token_ids: Sequence[int] | npt.NDArray[np.int32], count: int) -> list[int]:
        """See `Drafter`. Of long texts an array costs less, which is not copied."""
        tokens = np.asarray(token_ids, np.int32)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where tokens like the last `size` end
        size = min(1, ends.size)
        for behind in range(1, self.longest):
            longer = ends[ends >= behind]
            longer = longer[tokens[longer - behind] == tokens[len(tokens) - 1 - behind]]
            if not longer.size:
                break
            ends, size = longer, behind + 1
        if size < max(1, self.shortest):
            return []
        start = int(ends[-1]) + 1
        return tokens[start : start + count].tolist()
