"""What must be on the device before a step besides what steps have written."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from hybrid_jax.engine.cache_manager import CacheManager
from hybrid_jax.engine.types import Sequence, StepRunner

if TYPE_CHECKING:
    from hybrid_jax.config import EngineConfig


class StepMemory:
    """Carries out on the runner what the cache manager decided on the host.

    Everything is launched behind the steps under way and ahead of the next one, so nothing waits.
    """

    def __init__(
        self,
        runner: StepRunner,
        cache: CacheManager,
        config: "EngineConfig",
        stop_ids: Collection[int],
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._poison = config.debug_poison
        self._stop_ids = stop_ids

    def prepare(self, admitted: list[Sequence]) -> None:
        """Poisons what was freed, copies pages, and sets up the rows of new sequences."""
        freed = self._cache.take_freed()
        if self._poison:
            self._fill(freed, float("nan"))
        for group, pairs in self._cache.take_copies().items():
            self._runner.copy(group, list(pairs.values()), list(pairs))
        for sequence in admitted:
            self._set_row(sequence)
            if sequence.num_computed_tokens:
                known = sequence.token_ids[: sequence.num_computed_tokens]
                self._runner.set_history(sequence.row, known)

    def clear_freed(self) -> None:
        """Overwrites what was just freed, for it cannot be trusted, before anybody reuses it."""
        self._fill(self._cache.take_freed(), 0.0)

    def _fill(self, ids: dict[int, list[int]], value: float) -> None:
        for group, some in ids.items():
            self._runner.fill(group, some, value)

    def _set_row(self, sequence: Sequence) -> None:
        params = sequence.request.params
        stop_ids: set[int] = set()
        if params.min_tokens:  # otherwise nothing is ever barred
            stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._stop_ids)}
        self._runner.sampling_rows.set_row(
            sequence.row, params, sequence.seed, sequence.num_prompt_tokens, stop_ids=stop_ids
        )
