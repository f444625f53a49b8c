"""Which pages, slots and row each sequence holds: one decision over all cache groups."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hybrid_jax.cache.plan import pages_for, table_width
from hybrid_jax.cache.pools import IdPool, PagePool, RowPool, SlotPool
from hybrid_jax.engine.types import GroupStats, PageRun, ReleaseReason, Sequence, SlotPair
from hybrid_jax.errors import IntegrityError
from hybrid_jax.specs import CacheGroup, CacheSpec, PagedSpec, StateSpec, WindowSpec

if TYPE_CHECKING:
    from hybrid_jax.cache.arrays import CacheSizes
    from hybrid_jax.config import EngineConfig

IntArray = npt.NDArray[np.int32]


class _PageGroup:
    """Pool and host page table of one full or window group."""

    def __init__(self, spec: PagedSpec, size: int, config: "EngineConfig") -> None:
        self.window = spec.window if isinstance(spec, WindowSpec) else None
        self.pool = PagePool(size)
        self.width = table_width(spec, config)
        self.page_size = config.page_size
        self.table = np.zeros((config.max_num_seqs + 1, self.width), np.int32)  # [R, M]

    def pages_at_most(self, num_tokens: int) -> int:
        """Pages a sequence holds at once, at most, on its way to `num_tokens` computed tokens."""
        pages = pages_for(num_tokens, self.page_size)
        return pages if self.window is None else min(pages, self.width)

    def first_live_page(self, num_computed_tokens: int) -> int:
        """The first logical page that the token at position `num_computed_tokens` can see."""
        if self.window is None:
            return 0
        return max(0, num_computed_tokens - self.window + 1) // self.page_size


class _StateGroup:
    """Pool and host slot tables of one state group."""

    def __init__(self, size: int, config: "EngineConfig") -> None:
        self.pool = SlotPool(size)
        self.read = np.zeros(config.max_num_seqs + 1, np.int32)  # [R]
        self.write = np.zeros(config.max_num_seqs + 1, np.int32)  # [R]


class CacheManager:
    """Pools, page tables and slot tables of all cache groups, and the persistent rows.

    Sequences own ids; the tables mirror them per persistent row, so that a batch's tables are one
    gather. Row 0 of every table stays null: it serves the padding rows.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        sizes: "CacheSizes",
        config: "EngineConfig",
        *,
        on_row_release: Callable[[int], None] | None = None,
    ) -> None:
        """`on_row_release` hears of every row that a sequence gives back, whatever the reason."""
        self._specs: tuple[CacheSpec, ...] = tuple(group.spec for group in groups)
        self._sizes = sizes
        self._config = config
        self._on_row_release = on_row_release
        self.page_size = config.page_size
        self.reset()

    def reset(self) -> None:
        """Forgets every holder: all ids are free. Sequences must be reset by the caller."""
        self.rows = RowPool(self._config.max_num_seqs + 1)
        self.row_owners = np.zeros(self.rows.size, np.int32)  # uid per row; [R]
        self.page_groups: dict[int, _PageGroup] = {}
        self.state_groups: dict[int, _StateGroup] = {}
        for i, (spec, size) in enumerate(zip(self._specs, self._sizes.counts, strict=True)):
            if isinstance(spec, StateSpec):
                self.state_groups[i] = _StateGroup(size, self._config)
            else:
                self.page_groups[i] = _PageGroup(spec, size, self._config)

    def shortage(self, num_tokens: int) -> str | None:
        """Why a sequence of `num_tokens` computed tokens can never fit; None if it can."""
        for i, group in self.page_groups.items():
            need = group.pages_at_most(num_tokens)
            if need > group.pool.capacity:
                return (
                    f"{need} pages of {self.page_size} tokens in cache group {i} "
                    f"({self._kind(i)}), which has {group.pool.capacity}"
                )
        return None

    def can_admit(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a waiting sequence can be prefilled without taking pages from running ones.

        Leaves room for what running prefills still need and for the next page of every running
        sequence: what is preempted a step after its admission was computed for nothing.
        """
        if not self.rows.num_free or any(not g.pool.num_free for g in self.state_groups.values()):
            return False
        others = list(running)
        for i, group in self.page_groups.items():
            room = group.pool.num_free - group.pages_at_most(len(sequence.token_ids))
            room -= sum(self._soon(other, i, group) for other in others)
            if room < 0:
                return False
        return True

    def _soon(self, sequence: Sequence, i: int, group: "_PageGroup") -> int:
        """Pages a running sequence will take soon: for its prefill, and one to decode into."""
        run = sequence.pages[i]
        assert run is not None
        prefill = pages_for(sequence.num_prefill_tokens, self.page_size)
        most = pages_for(sequence.num_prompt_tokens + sequence.max_tokens - 1, self.page_size)
        ahead = max(0, prefill - sequence.num_pages)
        if group.window is not None:
            ahead = min(ahead, group.width - len(run.ids))
        return ahead + (1 if most > max(prefill, sequence.num_pages) else 0)

    def allocate(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Makes room for `num_new_tokens` more tokens in every cache group, or changes nothing.

        The first allocation of a sequence also takes its row and its state slots.
        """
        end = sequence.num_computed_tokens + num_new_tokens
        pages = -(-end // self.page_size) - sequence.num_pages
        if sequence.row and pages <= 0:
            return True  # the common decode step
        if any(group.pool.num_free < pages for group in self.page_groups.values()):
            return False
        if not sequence.row:
            if not self.rows.num_free:
                return False
            if any(not group.pool.num_free for group in self.state_groups.values()):
                return False
            self._attach(sequence)
        self._extend(sequence, pages)
        return True

    def advance(self, sequence: Sequence) -> None:
        """Counts the scheduled tokens as computed; call it once their step is launched.

        Pages that no later token can see go back to their pools. A later step may reuse them at
        once: the device runs steps in order.
        """
        sequence.num_computed_tokens += sequence.num_scheduled_tokens
        sequence.num_scheduled_tokens = 0
        for i, group in self.page_groups.items():
            if group.window is None:
                continue
            run = sequence.pages[i]
            assert run is not None
            live = group.first_live_page(sequence.num_computed_tokens)
            while run.first < live and run.ids:
                group.table[sequence.row, run.first % group.width] = 0
                group.pool.free(run.ids.popleft())
                run.first += 1

    def release(self, sequence: Sequence, reason: ReleaseReason) -> None:
        """Gives back everything `sequence` holds; nothing of it counts as computed any more.

        Serves finish, abort, preemption and failure. Idempotent. Its time depends on what the
        sequence holds, not on the pools.
        """
        del reason  # every reason gives back everything; a prefix cache would keep finished pages
        row = sequence.row
        if row:
            for i, group in self.page_groups.items():
                run = sequence.pages[i]
                assert run is not None
                for page in reversed(run.ids):
                    group.pool.free(page)
                group.table[row] = 0
            for i, group in self.state_groups.items():
                pair = sequence.slots[i]
                assert pair is not None
                for slot in {pair.read, pair.write}:
                    group.pool.free(slot)
                group.read[row] = group.write[row] = 0
            self.row_owners[row] = 0
            self.rows.free(row)
            if self._on_row_release is not None:
                self._on_row_release(row)
        self.detach(sequence)

    @staticmethod
    def detach(sequence: Sequence) -> None:
        """Makes `sequence` hold nothing, without touching the pools."""
        sequence.row = sequence.num_pages = 0
        sequence.pages = sequence.slots = ()
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = 0
        sequence.num_prefill_tokens = 0

    def stats(self) -> tuple[GroupStats, ...]:
        """Use of every cache group, in their order, and of the persistent rows."""
        pools: list[tuple[str, IdPool]] = []
        for i in range(len(self._specs)):
            group = self.page_groups.get(i) or self.state_groups[i]
            pools.append((f"{i}:{self._kind(i)}", group.pool))
        pools.append(("rows", self.rows))
        return tuple(GroupStats(name, p.capacity, p.num_used, p.peak) for name, p in pools)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Checks that every id is in exactly one place and every table mirrors its sequence.

        Args:
            sequences: all that hold anything.

        Raises:
            IntegrityError: naming the first id or row that is wrong.
        """
        holders = [s for s in sequences if s.row]
        self.rows.check_integrity(Counter(s.row for s in holders))
        owners = np.zeros_like(self.row_owners)
        for sequence in holders:
            owners[sequence.row] = sequence.uid
        _require_equal(owners, self.row_owners, "row owners")
        for i, group in self.page_groups.items():
            table, users = np.zeros_like(group.table), Counter[int]()
            for sequence in holders:
                run = sequence.pages[i]
                assert run is not None
                users.update(run.ids)
                if run.first + len(run.ids) != sequence.num_pages or len(run.ids) > group.width:
                    raise IntegrityError(
                        f"sequence {sequence.uid} has a torn page run in group {i}"
                    )
                for k, page in enumerate(run.ids, run.first):
                    table[sequence.row, k % group.width] = page
            group.pool.check_integrity(users)
            _require_equal(table, group.table, f"page table of group {i}")
        for i, group in self.state_groups.items():
            pairs = {s.row: s.slots[i] for s in holders}
            users = Counter[int]()
            read, write = np.zeros_like(group.read), np.zeros_like(group.write)
            for row, pair in pairs.items():
                assert pair is not None
                users.update({pair.read, pair.write})
                read[row], write[row] = pair.read, pair.write
            group.pool.check_integrity(users)
            _require_equal(read, group.read, f"read slots of group {i}")
            _require_equal(write, group.write, f"write slots of group {i}")

    def _attach(self, sequence: Sequence) -> None:
        row = sequence.row = self.rows.alloc()
        self.row_owners[row] = sequence.uid
        count = len(self._specs)
        sequence.pages = tuple(PageRun() if i in self.page_groups else None for i in range(count))
        slots: list[SlotPair | None] = [None] * count
        for i, group in self.state_groups.items():
            slot = group.pool.alloc()
            slots[i] = SlotPair(slot, slot)
            group.read[row] = group.write[row] = slot
        sequence.slots = tuple(slots)

    def _extend(self, sequence: Sequence, num_pages: int) -> None:
        first = sequence.num_pages
        for i, group in self.page_groups.items():
            run = sequence.pages[i]
            assert run is not None
            for logical in range(first, first + num_pages):
                page = group.pool.alloc()
                run.ids.append(page)
                group.table[sequence.row, logical % group.width] = page
        sequence.num_pages += num_pages

    def _kind(self, i: int) -> str:
        spec = self._specs[i]
        if isinstance(spec, StateSpec):
            return "linear"
        return "window" if isinstance(spec, WindowSpec) else "full"


def _require_equal(expected: IntArray, actual: IntArray, what: str) -> None:
    if not np.array_equal(expected, actual):
        row = int(np.argwhere(expected != actual)[0][0])
        raise IntegrityError(f"{what}: row {row} does not mirror its sequence")
