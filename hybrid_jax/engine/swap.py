"""What preempted sequences had computed, in host memory, so that they go on where they were."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_jax.cache.plan import first_live_page, pages_for
from hybrid_jax.cache.prefix import Prefix, PrefixTree
from hybrid_jax.engine.types import Sequence, SwapStats
from hybrid_jax.errors import IntegrityError
from hybrid_jax.specs import CacheGroup, CacheSpec, StateSpec, WindowSpec

if TYPE_CHECKING:
    import numpy as np

    from hybrid_jax.config import EngineConfig


@dataclass(eq=False)
class Saved:
    """The first `length` tokens of a preempted sequence.

    `ids` has, per cache group, the last of its pages or its slot as they were when it was
    preempted. What they held is in `arrays` once the device was asked; one dict per group.
    """

    length: int
    ids: tuple[tuple[int, ...], ...]
    nbytes: int
    arrays: "tuple[dict[str, np.ndarray], ...]" = ()


class SwapSpace:
    """Decides what of a preempted sequence goes to the host, and what comes back. Ids only.

    A sequence is saved whole or not at all, with one exception: the first of its full-attention
    pages, which are in the prefix tree as well and are evicted last, are left out where the space
    is short. Without its last page its state would be of no use, nor a page without its state.
    """

    def __init__(self, groups: tuple[CacheGroup, ...], config: "EngineConfig") -> None:
        """`config` is resolved; its `swap_bytes` is the space, 0 for none."""
        self._config = config
        self._specs = [group.spec for group in groups]
        self._unit_bytes = [_unit_bytes(group, config.page_size) for group in groups]
        self._saved: dict[int, Saved] = {}  # by uid
        self._used = self._peak = self._num_out = self._num_in = 0

    def save(self, sequence: Sequence, copies: Mapping[int, Mapping[int, int]]) -> None:
        """Hears that a sequence is about to be preempted, and saves it if there is room.

        Args:
            sequence: still holds what it computed.
            copies: per page group the copies that are still to be made, target -> source.
        """
        length, size = sequence.num_computed_tokens, self._config.page_size
        if not (self._config.swap_bytes and length and sequence.is_good):
            return
        if sequence.began_restored:
            return  # whose pages are in no tree; it starts again from its snapshot
        if sequence.uid in self._saved:
            return  # it was about to come back, but nothing was launched
        end, firsts = pages_for(length, size), []
        for spec in self._specs:
            windowed = isinstance(spec, WindowSpec)
            firsts.append(first_live_page(length, spec.window, size) if windowed else 0)
        in_tree = sequence.num_committed_tokens // size if self._config.prefix_cache else 0
        full = [i for i, spec in enumerate(self._specs) if _is_full(spec)]
        left_out = self._left_out(firsts, full, end)
        if left_out > in_tree:
            return
        for i in full:
            firsts[i] = left_out
        ids: list[tuple[int, ...]] = []
        for i, (run, slots) in enumerate(zip(sequence.pages, sequence.slots, strict=True)):
            if run is not None:
                pages = [run[k] for k in range(firsts[i], end)]
                ids.append(tuple(copies[i].get(page, page) for page in pages))
            else:
                ids.append((slots.read,) if slots is not None else ())
        nbytes = sum(len(some) * each for some, each in zip(ids, self._unit_bytes, strict=True))
        self._saved[sequence.uid] = Saved(length, tuple(ids), nbytes)
        self._num_out += 1
        self._used += nbytes
        self._peak = max(self._peak, self._used)

    def _left_out(self, firsts: list[int], full: list[int], end: int) -> int:
        """How many full pages there is no room for, counted from the first; more if none helps."""
        room = self._config.swap_bytes - self._used
        for i, each in enumerate(self._unit_bytes):
            if i not in full:
                is_state = isinstance(self._specs[i], StateSpec)
                room -= each * (1 if is_state else end - firsts[i])
        if room < 0:
            return end + 1
        per_page = sum(self._unit_bytes[i] for i in full)
        return max(0, end - room // per_page) if per_page else 0

    def get(self, sequence: Sequence) -> Saved | None:
        """What is saved of a sequence."""
        return self._saved.get(sequence.uid)

    def find(self, sequence: Sequence, tree: PrefixTree) -> Prefix | None:
        """All that a waiting sequence had computed, if it can still be put together.

        Of full-attention pages, those in the tree serve, and the host has the rest.
        """
        saved = self._saved.get(sequence.uid)
        if saved is None:
            return None
        end = pages_for(saved.length, self._config.page_size)
        shared = tree.full_pages(sequence.token_ids, saved.length)
        missing: list[int] = []
        for spec, ids, cached in zip(self._specs, saved.ids, shared, strict=True):
            missing.append(end - len(cached) if _is_full(spec) else len(ids))
            if missing[-1] > len(ids):
                return None
        return Prefix(saved.length, shared, missing=tuple(missing))

    def restored(self, sequence: Sequence) -> None:
        """Hears that a sequence runs again with what was saved."""
        self._num_in += 1
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forgets what is saved of a sequence. Idempotent."""
        saved = self._saved.pop(sequence.uid, None)
        if saved is not None:
            self._used -= saved.nbytes

    def clear(self) -> None:
        """Forgets everything."""
        self._saved.clear()
        self._used = 0

    def check_integrity(self) -> None:
        """Raises IntegrityError if the bytes do not add up or exceed the space."""
        used = sum(saved.nbytes for saved in self._saved.values())
        if used != self._used or used > self._config.swap_bytes:
            raise IntegrityError(f"{used} bytes are swapped out but {self._used} are counted")

    def stats(self) -> SwapStats:
        """Bytes and counters."""
        return SwapStats(
            self._config.swap_bytes, self._used, self._peak, self._num_out, self._num_in
        )


def _is_full(spec: CacheSpec) -> bool:
    return not isinstance(spec, StateSpec | WindowSpec)


def _unit_bytes(group: CacheGroup, page_size: int) -> int:
    """Bytes of a page or a slot in all layers of a group, without a device's padding."""
    spec = group.spec
    each = spec.nbytes if isinstance(spec, StateSpec) else spec.bytes_per_token * page_size
    return each * len(group.layers)
