"""Speculative decoding in the engine: guesses at the next tokens, and how they went.

With `num_speculative_tokens` K > 0 every decode step is a VERIFY step: a row feeds its newest token
and K guesses, and samples after each. The sampled tokens that follow right guesses count, whatever
the sampling parameters are: a draw depends on seed and position, and penalties, biases and logits
processors see the tokens up to the position, which are the right ones as long as the guesses are.
So the tokens are those of an engine that guesses nothing.

Structured output knows which tokens may come only once the ones before them are known: its rows
make no guesses, in the same kind of step.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hybrid_jax.drafts import PromptLookup
from hybrid_jax.engine.scheduler import Schedule
from hybrid_jax.engine.types import Sequence, SpeculationStats

if TYPE_CHECKING:
    from hybrid_jax.config import EngineConfig


class Speculation:
    """Makes the guesses and counts the right ones."""

    def __init__(self, config: "EngineConfig") -> None:
        """`config` is resolved; its `num_speculative_tokens` may be 0: nothing is guessed."""
        self._most = config.num_speculative_tokens
        self.drafter: Callable[[npt.NDArray[np.int32], int], list[int]] = PromptLookup()
        self._num_verified = self._draft_tokens = self._accepted_tokens = 0

    def steps(self, plan: Schedule) -> list[Schedule]:
        """The steps that a schedule takes: prompts have no part in those that verify."""
        return plan.split() if self._most else [plan]

    def draft(self, sequences: Iterable[Sequence]) -> None:
        """Guesses what comes after the newest token of each sequence, which is known."""
        if not self._most:
            return
        for sequence in sequences:
            if not sequence.matcher:
                sequence.draft_token_ids = self.drafter(_token_array(sequence), self._most)

    def verified(self, sequence: Sequence, drafts: list[int]) -> None:
        """Hears that a step verified the guesses of a sequence."""
        self._num_verified += 1
        self._draft_tokens += len(drafts)
        sequence.num_draft_tokens += len(drafts)

    def accepted(self, sequence: Sequence) -> None:
        """Hears that a right guess becomes output."""
        self._accepted_tokens += 1
        sequence.num_accepted_tokens += 1

    def stats(self) -> SpeculationStats:
        """The counters."""
        return SpeculationStats(self._num_verified, self._draft_tokens, self._accepted_tokens)


def _token_array(sequence: Sequence) -> npt.NDArray[np.int32]:
    """Its tokens. To make an array of a long list in every step would cost more than a guess."""
    new = sequence.token_ids[len(sequence.token_array) :]
    sequence.token_array = np.append(sequence.token_array, np.array(new, np.int32))
    return sequence.token_array
