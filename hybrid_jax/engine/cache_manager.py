"""Which pages, slots and row each sequence holds: one decision over all cache groups."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from hybrid_jax.cache.plan import pages_for
from hybrid_jax.cache.pools import IdPool, RowPool
from hybrid_jax.engine.cache_groups import PageGroup, StateGroup
from hybrid_jax.engine.prefix_cache import PrefixCache
from hybrid_jax.engine.swap import SwapSpace
from hybrid_jax.engine.types import PageRun, ReleaseReason, Sequence
from hybrid_jax.errors import ModelError
from hybrid_jax.specs import CacheGroup, CacheSpec, StateSpec, WindowSpec

if TYPE_CHECKING:
    from hybrid_jax.cache.arrays import CacheSizes
    from hybrid_jax.config import EngineConfig


class CacheManager:
    """Pools, page tables and slot tables of all cache groups, the persistent rows and the tree.

    Sequences own ids; the tables mirror them per persistent row, so that a batch's tables are one
    gather. Row 0 of every table stays null: it serves the padding rows.

    Nobody writes what somebody else may read. A sequence that shares its last page or its state
    with others, or with the prefix tree, gets one of its own before its next step: the page is
    copied (`take_copies`), the state is read in one slot and written in another.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        sizes: "CacheSizes",
        config: "EngineConfig",
        *,
        on_row_release: Callable[[int], None] | None = None,
    ) -> None:
        """`on_row_release` hears of every row that a sequence gives back, whatever the reason.

        Raises:
            ModelError: a cache group has no room for a single token.
        """
        if min(sizes.counts, default=2) < 2:
            raise ModelError(
                f"cache groups of {sizes.counts} pages or slots leave one with nothing but "
                "its null id; raise num_pages or cache_bytes"
            )
        self._specs: tuple[CacheSpec, ...] = tuple(group.spec for group in groups)
        self._sizes = sizes
        self._config = config
        self._on_row_release = on_row_release
        self.page_size = config.page_size
        self.num_prompt_tokens = 0  # of all prompts so far
        self.num_cached_tokens = 0  # those of them that were in the caches already
        self.num_recomputed_tokens = 0  # of sequences that were preempted
        self.swap = SwapSpace(groups, config)
        self.reset()

    def reset(self) -> None:
        """Forgets every holder: all ids are free. Sequences must be reset by the caller."""
        self.rows = RowPool(self._config.max_num_seqs + 1)
        self.row_owners = np.zeros(self.rows.size, np.int32)  # uid per row; [R]
        self.read_owners = np.zeros(self.rows.size, np.int32)  # uid that wrote the read slots; [R]
        self.page_groups: dict[int, PageGroup] = {}
        self.state_groups: dict[int, StateGroup] = {}
        for i, (spec, size) in enumerate(zip(self._specs, self._sizes.counts, strict=True)):
            if isinstance(spec, StateSpec):
                self.state_groups[i] = StateGroup(size, self._config)
            else:
                self.page_groups[i] = PageGroup(spec, size, self._config)
        self.swap.clear()
        self.prefixes = PrefixCache(
            self._specs, self.page_groups, self.state_groups, self._config, self.swap
        )
        self._copies: dict[int, dict[int, int]] = {i: {} for i in self.page_groups}

    @property
    def pools(self) -> list[IdPool]:
        """The pool of each cache group, in order."""
        return self.prefixes.pools

    def shortage(self, num_tokens: int) -> str | None:
        """Why a sequence of `num_tokens` computed tokens can never fit; None if it can."""
        for i, group in self.page_groups.items():
            need = group.pages_at_most(num_tokens)
            if need > group.pool.capacity:
                return (
                    f"{need} pages of {self.page_size} tokens in cache group {i} "
                    f"({self.kind(i)}), which has {group.pool.capacity}"
                )
        return None

    def can_admit(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a waiting sequence can be prefilled without taking pages from running ones.

        Its `prefix` has just been looked up. Leaves room for what running prefills still need and
        for the next page of every running sequence: what is preempted a step after its admission
        was computed for nothing.
        """
        prefix = sequence.prefix
        assert prefix is not None
        if not self.rows.num_free:
            return False
        for i, group in self.state_groups.items():
            room = group.pool.num_free - sum(map(group.pool.is_idle, prefix.ids[i]))
            if room < group.num_written:
                return False
        others = list(running)
        for i, group in self.page_groups.items():
            ids, pool = prefix.ids[i], group.pool
            need = group.pages_at_most(len(sequence.token_ids)) - len(ids)
            # The copy of a partial page that others hold.
            need += bool(prefix.length % self.page_size and not prefix.missing)
            room = pool.num_free - sum(map(pool.is_idle, ids)) - need
            room -= sum(self._soon(other, i, group) for other in others)
            if room < 0:
                return False
        return True

    def _soon(self, sequence: Sequence, i: int, group: PageGroup) -> int:
        """Pages a running sequence will take soon: for its prefill, and to decode into."""
        run = sequence.pages[i]
        assert run is not None
        prefill = pages_for(sequence.num_prefill_tokens, self.page_size)
        last = sequence.num_prompt_tokens + sequence.max_tokens - 1
        most = pages_for(last + self._config.num_speculative_tokens, self.page_size)
        ahead = max(0, prefill - sequence.num_pages)
        if group.window is not None:
            ahead = max(0, min(ahead, group.width - len(run.ids)))
        left = max(0, most - max(prefill, sequence.num_pages))
        return ahead + min(left, pages_for(self._config.tokens_per_decode, self.page_size))

    def attach(self, sequence: Sequence) -> None:
        """Gives a sequence that can be admitted its row, its prefix and its state slots."""
        prefix = sequence.prefix
        assert prefix is not None
        row = sequence.row = self.rows.alloc()
        self.row_owners[row], self.read_owners[row] = sequence.uid, prefix.owner or sequence.uid
        sequence.num_pages = pages_for(prefix.length, self.page_size)
        groups = range(len(self._specs))
        # State slots first: a fresh one may evict an idle one, but none of this prefix's.
        slots = {i: g.attach(row, prefix.ids[i]) for i, g in self.state_groups.items()}
        pages: dict[int, PageRun] = {}
        for i, group in self.page_groups.items():
            missing = prefix.missing[i] if prefix.missing else 0
            pages[i] = group.attach(row, prefix.ids[i], sequence.num_pages - missing)
            group.extend(row, pages[i], missing)
        sequence.slots = tuple(slots.get(i) for i in groups)
        sequence.pages = tuple(pages.get(i) for i in groups)
        sequence.may_share = prefix.length > 0
        sequence.num_computed_tokens = prefix.length

    def count(self, sequence: Sequence) -> None:
        """Counts what an admitted sequence has computed already, or computes again."""
        if not sequence.was_admitted:  # not before a preemption either, or a step that failed
            sequence.was_admitted = True
            self.num_prompt_tokens += sequence.num_prompt_tokens
            self.num_cached_tokens += sequence.num_computed_tokens
        lost = sequence.num_preempted_tokens - sequence.num_computed_tokens
        self.num_recomputed_tokens += max(0, lost)
        sequence.num_preempted_tokens = 0

    def allocate(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Makes room for `num_new_tokens` more tokens in every cache group, or changes nothing."""
        end = sequence.num_computed_tokens + num_new_tokens
        pages = max(0, pages_for(end, self.page_size) - sequence.num_pages)
        shared = self._shared(sequence) if sequence.may_share else ()
        if not pages and not shared:
            return True  # the common decode step
        pools = self.pools
        for i in range(len(pools)):
            need = (pages if i in self.page_groups else 0) + (i in shared)
            if pools[i].num_free < need:
                return False
        self._own(sequence, shared)
        for i, group in self.page_groups.items():
            run = sequence.pages[i]
            assert run is not None
            group.extend(sequence.row, run, pages)
        sequence.num_pages += pages
        return True

    def _shared(self, sequence: Sequence) -> tuple[int, ...]:
        """The groups in which the next token would be written where others may read."""
        shared = []
        page, filled = divmod(sequence.num_computed_tokens, self.page_size)
        for i, group in self.page_groups.items():
            run = sequence.pages[i]
            if filled and run and group.pool.is_read_only(run[page]):
                shared.append(i)
        for i, group in self.state_groups.items():
            slots = sequence.slots[i]
            if slots and slots.read in slots.write and group.pool.is_read_only(slots.read):
                shared.append(i)
        return tuple(shared)

    def _own(self, sequence: Sequence, shared: tuple[int, ...]) -> None:
        for i in shared:
            run, slots = sequence.pages[i], sequence.slots[i]
            if run is not None:
                page = sequence.num_computed_tokens // self.page_size
                old, new = self.page_groups[i].own(sequence.row, run, page)
                self._copies[i][new] = old
            elif slots is not None:
                self.state_groups[i].write_elsewhere(sequence.row, slots, slots.read)
        sequence.may_share = False

    def advance(self, sequence: Sequence, *, verified: int = 0) -> None:
        """Counts the scheduled tokens as computed; call it once their step is launched.

        Of a step that verifies guesses, call it once it is known how many of the row's tokens
        count: the first `verified` ones. The others are taken back by reading another slot next.
        """
        start, last = sequence.num_computed_tokens, max(0, verified - 1)
        sequence.num_computed_tokens += verified or sequence.num_scheduled_tokens
        sequence.num_scheduled_tokens = 0
        for i, group in self.state_groups.items():
            slots = sequence.slots[i]
            assert slots is not None
            if slots.read != slots.write[last]:
                group.settle(sequence.row, slots, last)
        self.read_owners[sequence.row] = sequence.uid
        self.prefixes.advance(sequence, start, last)

    def commit(self, sequence: Sequence, num_tokens: int, *, good: bool) -> None:
        """Hears that the step which computed tokens up to `num_tokens` is done.

        What a `good` step computed may be cached from now on. Pages that no later token can see go
        back to their pools; a later step may reuse them at once, since the device runs steps in
        order.
        """
        if not sequence.row:  # preempted meanwhile
            if not good:
                self.swap.drop(sequence)
            return
        before, sequence.num_committed_tokens = sequence.num_committed_tokens, num_tokens
        sequence.is_good &= good
        self.prefixes.commit(sequence, before)
        for i, group in self.page_groups.items():
            if group.window is not None:
                run = sequence.pages[i]
                assert run is not None
                group.trim(sequence.row, run, num_tokens)

    def preempt(self, sequence: Sequence) -> None:
        """Takes everything from a running sequence that is to come back."""
        sequence.num_preempted_tokens = sequence.num_computed_tokens
        self.swap.save(sequence, self._copies)
        self.release(sequence, ReleaseReason.PREEMPT)

    def release(self, sequence: Sequence, reason: ReleaseReason) -> None:
        """Gives back everything `sequence` holds; nothing of it counts as computed any more.

        Serves finish, abort, preemption and failure. Idempotent. Its time depends on what the
        sequence holds, not on the pools. What a failed sequence read or wrote is not cached any
        more.
        """
        row = sequence.row
        if row:
            self.prefixes.leave(sequence, failed=reason is ReleaseReason.FAILURE)
            for i, group in self.page_groups.items():
                run = sequence.pages[i]
                assert run is not None
                group.release(row, run)
            for i, group in self.state_groups.items():
                slots = sequence.slots[i]
                assert slots is not None
                group.release(row, slots)
            self.row_owners[row] = self.read_owners[row] = 0
            self.rows.free(row)
            if self._on_row_release is not None:
                self._on_row_release(row)
        if reason is not ReleaseReason.PREEMPT:
            self.swap.drop(sequence)
        self.detach(sequence)

    @staticmethod
    def detach(sequence: Sequence) -> None:
        """Makes `sequence` hold nothing, without touching the pools."""
        sequence.row = sequence.num_pages = 0
        sequence.pages = sequence.slots = ()
        sequence.num_computed_tokens = sequence.num_committed_tokens = 0
        sequence.num_scheduled_tokens = sequence.num_prefill_tokens = 0
        sequence.prefix = sequence.node = sequence.decode_checkpoint = None
        sequence.stops = ()
        sequence.draft_token_ids = []
        sequence.checkpoints.clear()
        sequence.may_share, sequence.is_good = False, True

    def take_copies(self) -> dict[int, dict[int, int]]:
        """Per page group the pages to copy before the next step: target -> source."""
        copies = {i: pairs for i, pairs in self._copies.items() if pairs}
        for i in copies:
            self._copies[i] = {}
        return copies

    def take_freed(self) -> dict[int, list[int]]:
        """Per cache group the ids that became free since the last call and still are."""
        freed = {}
        for i, pool in enumerate(self.pools):
            ids = [id_ for id_ in dict.fromkeys(pool.freed) if pool.is_free(id_)]
            pool.freed.clear()
            if ids:
                freed[i] = ids
        self.rows.freed.clear()
        return freed

    def kind(self, i: int) -> str:
        """The kind of layers of a cache group: full, window or linear."""
        spec = self._specs[i]
        if isinstance(spec, StateSpec):
            return "linear"
        return "window" if isinstance(spec, WindowSpec) else "full"
