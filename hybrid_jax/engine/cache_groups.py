"""Pool and host tables of one cache group. Tables have one line per persistent row."""

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from hybrid_jax.cache.plan import first_live_page, pages_for, table_width
from hybrid_jax.cache.pools import PagePool, SlotPool
from hybrid_jax.engine.types import PageRun, SlotPair
from hybrid_jax.specs import PagedSpec, WindowSpec

if TYPE_CHECKING:
    from hybrid_jax.config import EngineConfig


class PageGroup:
    """A full or window group. Logical page i of a row is in column i % width of its table."""

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
        return first_live_page(num_computed_tokens, self.window, self.page_size)

    def attach(self, row: int, ids: tuple[int, ...], num_pages: int) -> PageRun:
        """Gives `row` the pages of a prefix, the last one logical page `num_pages - 1`.

        Of a window group the first page follows from that, with or without `ids`.
        """
        run = PageRun(num_pages - len(ids), deque(ids))
        for logical, page in enumerate(ids, run.first):
            self.pool.share(page)
            self.table[row, logical % self.width] = page
        return run

    def extend(self, row: int, run: PageRun, count: int) -> None:
        """Allocates the next `count` logical pages."""
        for logical in range(run.first + len(run.ids), run.first + len(run.ids) + count):
            page = self.pool.alloc()
            run.ids.append(page)
            self.table[row, logical % self.width] = page

    def own_last(self, row: int, run: PageRun) -> tuple[int, int]:
        """Replaces the last page by a fresh one; returns both, for the copy on the device."""
        old, new = run.ids.pop(), self.pool.alloc()
        self.table[row, (run.first + len(run.ids)) % self.width] = new
        run.ids.append(new)
        self.pool.free(old)
        return old, new

    def trim(self, row: int, run: PageRun, num_tokens: int) -> None:
        """Gives back the pages that no token from position `num_tokens` on can see."""
        live = self.first_live_page(num_tokens)
        while run.first < live and run.ids:
            page, column = run.ids.popleft(), run.first % self.width
            if self.table[row, column] == page:  # it may be a later page's column by now
                self.table[row, column] = 0
            self.pool.free(page)
            run.first += 1

    def release(self, row: int, run: PageRun) -> None:
        """Gives back all pages, in the order in which they shall be evicted if they are cached.

        Of a full group the last pages go first: without them those before them are still of use.
        """
        for page in run.ids if self.window is not None else reversed(run.ids):
            self.pool.free(page)
        self.table[row] = 0


class StateGroup:
    """A state group: which slot each row reads and which one it writes."""

    def __init__(self, size: int, config: "EngineConfig") -> None:
        self.pool = SlotPool(size)
        self.read = np.zeros(config.max_num_seqs + 1, np.int32)  # [R]
        self.write = np.zeros(config.max_num_seqs + 1, np.int32)  # [R]

    def attach(self, row: int, ids: tuple[int, ...]) -> SlotPair:
        """Gives `row` the state of a prefix to read, or a fresh slot."""
        if ids:
            self.pool.share(ids[0])
        slot = ids[0] if ids else self.pool.alloc()
        self.read[row] = self.write[row] = slot
        return SlotPair(slot, slot)

    def write_elsewhere(self, row: int, pair: SlotPair) -> None:
        """Lets the next step write a fresh slot and leave the one it reads as it is."""
        pair.write = self.write[row] = self.pool.alloc()

    def settle(self, row: int, pair: SlotPair) -> None:
        """The step that read one slot and wrote another is launched: the next reads the latter."""
        self.pool.free(pair.read)
        pair.read = self.read[row] = pair.write

    def release(self, row: int, pair: SlotPair) -> None:
        """Gives back both slots."""
        for slot in {pair.read, pair.write}:
            self.pool.free(slot)
        self.read[row] = self.write[row] = 0
