"""What must be on the device before a step besides what steps have written."""

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from hybrid_jax.cache.plan import pages_for
from hybrid_jax.cache.prefix import Prefix
from hybrid_jax.engine.cache_manager import CacheManager
from hybrid_jax.engine.types import Sequence, StepRunner

if TYPE_CHECKING:
    from hybrid_jax.config import EngineConfig

logger = logging.getLogger(__name__)


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

    def swap_out(self, preempted: list[Sequence]) -> None:
        """Reads what was saved of preempted sequences, before anybody overwrites it.

        Waits for the step under way. If that fails, they are computed again like everything else.
        """
        for sequence in preempted:
            saved = self._cache.swap.get(sequence)
            if saved is None or saved.arrays:
                continue
            try:
                saved.arrays = tuple(
                    self._runner.read(g, ids) if ids else {} for g, ids in enumerate(saved.ids)
                )
            except Exception:
                logger.exception("sequence %d cannot be swapped out", sequence.uid)
                self._cache.swap.drop(sequence)

    def _swap_in(self, sequence: Sequence, prefix: Prefix) -> None:
        saved, cache = self._cache.swap.get(sequence), self._cache
        assert saved is not None
        end = pages_for(prefix.length, cache.page_size)
        for g, (count, arrays) in enumerate(zip(prefix.missing, saved.arrays, strict=True)):
            run, slots = sequence.pages[g], sequence.slots[g]
            ids = (
                [run[k] for k in range(end - count, end)] if run else [slots.read] if slots else []
            )
            if ids:  # or the tree has all of them
                last = {name: array[len(array) - count :] for name, array in arrays.items()}
                self._runner.write(g, ids, last, sequence.uid)
        cache.swap.restored(sequence)

    def prepare(self, admitted: list[Sequence]) -> None:
        """Poisons what was freed, copies pages, and sets up memory and rows of new sequences."""
        freed = self._cache.take_freed()
        if self._poison:
            self._fill(freed, float("nan"))
        for group, pairs in self._cache.take_copies().items():
            self._runner.copy(group, list(pairs.values()), list(pairs))
        for sequence in admitted:
            if sequence.prefix is not None and sequence.prefix.missing:
                self._swap_in(sequence, sequence.prefix)
            self._cache.swap.drop(sequence)  # of no use any more, wherever it started
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
