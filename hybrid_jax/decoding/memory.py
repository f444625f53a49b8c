"""Which pages and slots the sessions of a workspace hold. Ids only; no device work.

Sessions share pages and slots until one of them writes: then it writes to a page or slot of its
own. A page that is part full is copied first; a state is never copied, because a step reads one
slot and writes another.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import jax

from hybrid_jax.cache.plan import CachePlan, first_live_page, pages_for
from hybrid_jax.cache.pools import IdPool, PagePool, SlotPool
from hybrid_jax.errors import CachesFull, CannotRewind
from hybrid_jax.specs import PagedSpec, StateSpec, WindowSpec


@dataclass(frozen=True)
class Mark:
    """A length that a session can go on from: the states after so many tokens."""

    slots: dict[int, int]  # one per state group
    owner: int  # uid of the session that wrote the slots
    logits: jax.Array | None = None  # f32[N, V], of which `index` is those of the next token
    index: int = 0


@dataclass(eq=False)
class Memory:
    """What one session holds."""

    uid: int
    length: int = 0  # tokens computed
    pages: dict[int, dict[int, int]] = field(default_factory=dict)  # group -> logical page -> id
    marks: dict[int, Mark] = field(default_factory=dict)  # by length; the current one included
    checkpoints: set[int] = field(default_factory=set)  # marks that no step overwrites


@dataclass(frozen=True)
class Writes:
    """Where a step writes one session's new tokens."""

    slots: dict[int, list[int]]  # per state group: one, or one per token


Copies = dict[int, dict[int, int]]
"""Per page group: page to copy before the step -> its copy."""


class MemoryPools:
    """The pools of all cache groups, and what sessions may do with them."""

    def __init__(self, plan: CachePlan) -> None:
        specs = [group.spec for group in plan.groups]
        self.page_size = plan.sizes.page_size
        self.paged = {g: s for g, s in enumerate(specs) if isinstance(s, PagedSpec)}
        self.states = [g for g, spec in enumerate(specs) if isinstance(spec, StateSpec)]
        self.pools: list[IdPool] = [
            (SlotPool if g in self.states else PagePool)(count)
            for g, count in enumerate(plan.sizes.counts)
        ]

    def fork(self, memory: Memory, uid: int) -> Memory:
        """The same past for another session; checkpoints stay behind."""
        pages = {group: dict(ids) for group, ids in memory.pages.items()}
        child = Memory(uid, memory.length, pages)
        if memory.length in memory.marks:
            child.marks = {memory.length: memory.marks[memory.length]}
        for group, id_ in _held(child):
            self.pools[group].share(id_)
        return child

    def release(self, memory: Memory) -> None:
        """Gives everything back."""
        for group, id_ in _held(memory):
            self.pools[group].free(id_)
        memory.pages, memory.marks = {}, {}

    def reserve(
        self, memories: list[Memory], count: int, *, verify: bool
    ) -> tuple[list[Writes], Copies]:
        """Pages and slots for the next `count` tokens of every session, all or nothing.

        `verify`: a slot for the state after every token, instead of one after the last.

        Raises:
            CachesFull: there are too few.
        """
        for memory in memories:
            self._forget(memory)
        per_row = count if verify else 1
        writes = [
            Writes({g: self._own_slot(memory, g) for g in self.states}) for memory in memories
        ]
        need = {g: sum(per_row - len(write.slots[g]) for write in writes) for g in self.states} | {
            g: sum(len(self._unwritable(memory, g, count)) for memory in memories)
            for g in self.paged
        }
        self.require(need)
        for write in writes:
            for g, slots in write.slots.items():
                slots += [self.pools[g].alloc() for _ in range(per_row - len(slots))]
        copies: Copies = {g: {} for g in self.paged}
        replaced = []
        for memory in memories:
            for g in self.paged:
                ids = memory.pages.setdefault(g, {})
                for logical in self._unwritable(memory, g, count):
                    old, ids[logical] = ids.get(logical), self.pools[g].alloc()
                    if old is not None:
                        replaced.append((g, old))
                        copies[g][ids[logical]] = old
        # Only now, so that no page is a source and a target of the same copies.
        for g, id_ in replaced:
            self.pools[g].free(id_)
        return writes, copies

    def commit(
        self,
        memory: Memory,
        count: int,
        write: Writes,
        *,
        verify: bool,
        logits: jax.Array,
        first: int,
    ) -> None:
        """The step that wrote `write` is launched; `first` is the first mark's row of `logits`."""
        start = memory.length
        current = memory.marks.get(start)
        if current is not None and start not in memory.checkpoints:
            del memory.marks[start]
            self._free_slots(current, keep=write)
        memory.length += count
        lengths = range(start + 1, memory.length + 1) if verify else [memory.length]
        for i, length in enumerate(lengths):
            slots = {g: ids[i] for g, ids in write.slots.items()}
            memory.marks[length] = Mark(slots, memory.uid, logits, first + i)
        self._trim(memory)

    def rewind(self, memory: Memory, length: int) -> None:
        """Forgets everything after the first `length` tokens.

        Raises:
            CannotRewind: the states, or pages of a window layer, at that length are gone.
        """
        if self.states and length and length not in memory.marks:
            kept = sorted(mark for mark in memory.marks if mark < memory.length) or "no length"
            raise CannotRewind(
                f"cannot go back to {length} tokens: states of linear layers are kept at {kept} "
                "only; call checkpoint() at the lengths to come back to"
            )
        for group, ids in memory.pages.items():
            live = range(self._first_live(group, length), pages_for(length, self.page_size))
            if any(logical not in ids for logical in live):
                raise CannotRewind(
                    f"cannot go back to {length} tokens: pages that the window of cache group "
                    f"{group} saw then are gone; call checkpoint() at the lengths to come back to"
                )
        for group, ids in memory.pages.items():
            for logical in [n for n in ids if n >= pages_for(length, self.page_size)]:
                self.pools[group].free(ids.pop(logical))
        for later in [n for n in memory.marks if n > length]:
            self._free_slots(memory.marks.pop(later))
        memory.checkpoints = {n for n in memory.checkpoints if n <= length}
        memory.length = length

    def own(self, memory: Memory, group: int) -> tuple[list[int], list[int]]:
        """Makes all ids of a session in one group its own: which were shared, and their heirs."""
        if group in self.states:
            mark = memory.marks[memory.length]
            ids, keys = dict(mark.slots), [group]  # the mark may be a fork's as well
            memory.marks[memory.length] = replace(mark, slots=ids)
        else:
            ids, keys = memory.pages[group], list(memory.pages[group])
        pool = self.pools[group]
        shared = [key for key in keys if pool.users(ids[key]) > 1]
        self.require({group: len(shared)})
        old = [ids[key] for key in shared]
        new = [pool.alloc() for _ in shared]
        for key, id_ in zip(shared, new, strict=True):
            pool.free(ids[key])
            ids[key] = id_
        return old, new

    def live_pages(self, memory: Memory, group: int, length: int) -> dict[int, int]:
        """Logical page -> id of the pages that a token at position `length` and later ones use."""
        first = self._first_live(group, length)
        return {n: id_ for n, id_ in sorted(memory.pages.get(group, {}).items()) if n >= first}

    def require(self, need: dict[int, int]) -> None:
        """Raises CachesFull unless so many ids of each group are free."""
        for group, count in need.items():
            pool = self.pools[group]
            if pool.num_free < count:
                remedy = "num_checkpoints" if group in self.states else "max_num_seqs or num_pages"
                raise CachesFull(
                    f"{count} {pool.noun}s of cache group {group} are needed and {pool.num_free} "
                    f"of {pool.capacity} are free; close sessions or give the workspace more "
                    f"{remedy}"
                )

    def _own_slot(self, memory: Memory, group: int) -> list[int]:
        """The current slot, if this session may write it."""
        mark = memory.marks.get(memory.length)
        if mark is None or memory.length in memory.checkpoints:
            return []
        slot = mark.slots[group]
        return [slot] if self.pools[group].users(slot) == 1 else []

    def _unwritable(self, memory: Memory, group: int, count: int) -> list[int]:
        """Logical pages of the next `count` tokens that are missing or shared."""
        ids, pool = memory.pages.get(group, {}), self.pools[group]
        first, end = memory.length // self.page_size, memory.length + count
        pages = range(first, pages_for(end, self.page_size))
        return [n for n in pages if n not in ids or pool.users(ids[n]) > 1]

    def _forget(self, memory: Memory) -> None:
        """Gives back the states of lengths that are neither current nor checkpoints."""
        for length in set(memory.marks) - memory.checkpoints - {memory.length}:
            self._free_slots(memory.marks.pop(length))

    def _free_slots(self, mark: Mark, keep: Writes | None = None) -> None:
        for group, slot in mark.slots.items():
            if keep is None or slot not in keep.slots[group]:
                self.pools[group].free(slot)

    def _trim(self, memory: Memory) -> None:
        """Gives back pages that have left the windows of all lengths to come back to."""
        oldest = min(memory.marks)
        for group, ids in memory.pages.items():
            first = self._first_live(group, oldest)
            for logical in [n for n in ids if n < first]:
                self.pools[group].free(ids.pop(logical))

    def _first_live(self, group: int, length: int) -> int:
        spec = self.paged[group]
        if not isinstance(spec, WindowSpec):
            return 0
        return first_live_page(length, spec.window, self.page_size)


def _held(memory: Memory) -> Iterable[tuple[int, int]]:
    """(group, id) of everything a session holds."""
    for group, ids in memory.pages.items():
        yield from ((group, id_) for id_ in ids.values())
    for mark in memory.marks.values():
        yield from mark.slots.items()
