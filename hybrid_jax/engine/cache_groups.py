"""Pool and host tables of one cache group. Tables have one line per persistent row."""

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from hybrid_jax.cache.plan import first_live_page, pages_for, table_width
from hybrid_jax.cache.pools import PagePool, SlotPool
from hybrid_jax.engine.types import PageRun, StateRows
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

    def own(self, row: int, run: PageRun, logical: int) -> tuple[int, int]:
        """Replaces a page by a fresh one; returns both, for the copy on the device."""
        old, new = run[logical], self.pool.alloc()
        run.ids[logical - run.first] = self.table[row, logical % self.width] = new
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
    """A state group: which slot each row reads and which ones it writes."""

    def __init__(self, size: int, config: "EngineConfig") -> None:
        rows, self.num_written = config.max_num_seqs + 1, config.tokens_per_decode
        self.pool = SlotPool(size)
        self.read = np.zeros(rows, np.int32)  # [R]
        self.write = np.zeros((rows, self.num_written), np.int32)  # [R, K + 1]

    def attach(self, row: int, ids: tuple[int, ...]) -> StateRows:
        """Gives `row` the state of a prefix to read, or a fresh slot; and slots for guesses."""
        if ids:
            self.pool.share(ids[0])
        write = [ids[0] if ids else self.pool.alloc()]
        write += [self.pool.alloc() for _ in range(self.num_written - 1)]
        self.read[row], self.write[row] = write[0], write
        return StateRows(write[0], write)

    def write_elsewhere(self, row: int, slots: StateRows, kept: int) -> None:
        """Lets the next step write a fresh slot instead of `kept`, which stays as it is."""
        i = slots.write.index(kept)
        slots.write[i] = self.write[row, i] = self.pool.alloc()
        if kept != slots.read:
            self.pool.free(kept)

    def settle(self, row: int, slots: StateRows, last: int) -> None:
        """The step that wrote is launched: the next one reads the state after its token `last`."""
        if slots.read not in slots.write:
            self.pool.free(slots.read)
        slots.read = self.read[row] = slots.write[last]

    def release(self, row: int, slots: StateRows) -> None:
        """Gives back all slots."""
        for slot in {slots.read, *slots.write}:
            self.pool.free(slot)
        self.read[row] = self.write[row] = 0
