"""Which page, slot and row ids are free, and how many users each other id has. Ids only."""

from collections.abc import Mapping

from hybrid_jax.errors import IntegrityError

NULL_ID = 0  # padding reads and writes here; never handed out


class IdPool:
    """Ref-counted ids 1..size - 1; id 0 is the null id and is never handed out.

    Allocating and freeing one id takes constant time, whatever the size. The free list is a stack:
    the id freed last is handed out next, while its memory is still in the caches of the chip.
    """

    noun = "id"

    def __init__(self, size: int) -> None:
        """`size` counts the null id, as the device arrays do."""
        if size < 2:
            raise ValueError(
                f"a pool of {self.noun}s needs the null {self.noun} and one more, got size {size}"
            )
        self.size = size
        self._users = [0] * size
        self._free = list(range(size - 1, 0, -1))
        self.peak = 0

    @property
    def capacity(self) -> int:
        """Ids that can be in use at once."""
        return self.size - 1

    @property
    def num_free(self) -> int:
        """Ids that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Ids with at least one user."""
        return self.capacity - len(self._free)

    def users(self, id_: int) -> int:
        """How many users `id_` has; an id with more than one is read-only."""
        return self._users[id_]

    def alloc(self) -> int:
        """A free id, now with one user. The caller has checked `num_free`."""
        if not self._free:
            raise IntegrityError(f"no {self.noun} is free; check num_free before allocating")
        id_ = self._free.pop()
        self._users[id_] = 1
        self.peak = max(self.peak, self.num_used)
        return id_

    def share(self, id_: int) -> None:
        """Adds a user to an id that is in use."""
        self._require_used(id_)
        self._users[id_] += 1

    def free(self, id_: int) -> bool:
        """Takes one user away; returns whether that was the last one and the id is free again."""
        self._require_used(id_)
        self._users[id_] -= 1
        if self._users[id_]:
            return False
        self._free.append(id_)
        return True

    def check_integrity(self, references: Mapping[int, int]) -> None:
        """Checks that every id is either free or used exactly `references[id]` times.

        Raises:
            IntegrityError: naming the first id that is in no place, or in two.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError(f"a {self.noun} is twice in the free list")
        if NULL_ID in free or references.get(NULL_ID, 0):
            raise IntegrityError(f"the null {self.noun} is in use or in the free list")
        for id_ in range(1, self.size):
            expected = references.get(id_, 0)
            if self._users[id_] != expected:
                raise IntegrityError(
                    f"{self.noun} {id_} counts {self._users[id_]} users but has {expected}"
                )
            if (expected == 0) != (id_ in free):
                raise IntegrityError(f"{self.noun} {id_} has {expected} users and a wrong place")

    def _require_used(self, id_: int) -> None:
        if not 0 < id_ < self.size or not self._users[id_]:
            raise IntegrityError(f"{self.noun} {id_} is not in use (pool size {self.size})")


class PagePool(IdPool):
    """Pages of one full-attention or window cache group."""

    noun = "page"


class SlotPool(IdPool):
    """State slots of one state cache group."""

    noun = "slot"


class RowPool(IdPool):
    """Persistent rows: one per running sequence, across all cache groups."""

    noun = "row"
