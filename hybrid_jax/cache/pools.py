"""Which page, slot and row ids are free, and how many users each other id has. Ids only."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from hybrid_jax.errors import IntegrityError

NULL_ID = 0  # padding reads and writes here; never handed out


class IdPool:
    """Ref-counted ids 1..size - 1; id 0 is the null id and is never handed out.

    An id is in one of three places: it has users, it is free, or it is idle: without users, but
    cached, so that somebody may still want what it holds. Idle ids are handed out when nothing else
    is free, the one whose last user left first.

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
        self._cached: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.on_evict: Callable[[int], None] = self.uncache  # must uncache the id it is given
        self.peak = 0
        self.freed: list[int] = []  # ids that became free since somebody cleared this list

    @property
    def capacity(self) -> int:
        """Ids that can be in use at once."""
        return self.size - 1

    @property
    def num_free(self) -> int:
        """Ids that can be allocated now, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Cached ids without users."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Ids with at least one user."""
        return self.capacity - self.num_free

    def users(self, id_: int) -> int:
        """How many users `id_` has."""
        return self._users[id_]

    def is_free(self, id_: int) -> bool:
        """Whether nobody wants what `id_` holds: neither users nor a cache."""
        return not self._users[id_] and id_ not in self._cached

    def is_idle(self, id_: int) -> bool:
        """Whether `id_` is cached and has no users."""
        return id_ in self._idle

    def is_read_only(self, id_: int) -> bool:
        """Whether somebody besides one user may read `id_`: another user or a cache."""
        return self._users[id_] > 1 or id_ in self._cached

    def alloc(self) -> int:
        """A free id, now with one user. The caller has checked `num_free`."""
        if not self._free:
            if not self._idle:
                raise IntegrityError(f"no {self.noun} is free; check num_free before allocating")
            self.on_evict(next(iter(self._idle)))
        id_ = self._free.pop()
        self._users[id_] = 1
        self.peak = max(self.peak, self.num_used)
        return id_

    def share(self, id_: int) -> None:
        """Adds a user to an id that is in use or idle."""
        if id_ in self._idle:
            del self._idle[id_]
        else:
            self._require_used(id_)
        self._users[id_] += 1
        self.peak = max(self.peak, self.num_used)

    def free(self, id_: int) -> bool:
        """Takes one user away; returns whether that was the last one.

        The id is free again then, or idle if it is cached.
        """
        self._require_used(id_)
        self._users[id_] -= 1
        if self._users[id_]:
            return False
        if id_ in self._cached:
            self._idle[id_] = None
        else:
            self._release(id_)
        return True

    def cache(self, id_: int) -> None:
        """Keeps what an id in use holds beyond its last user, until it is evicted or uncached."""
        self._require_used(id_)
        self._cached.add(id_)

    def uncache(self, id_: int) -> None:
        """Undoes `cache`; an idle id becomes free."""
        self._cached.remove(id_)
        if id_ in self._idle:
            del self._idle[id_]
            self._release(id_)

    def check_integrity(
        self, references: Mapping[int, int], cached: AbstractSet[int] = frozenset()
    ) -> None:
        """Checks that every id is in one place and used exactly `references[id]` times.

        Args:
            references: users per id, for ids that have any.
            cached: the ids that a cache holds.

        Raises:
            IntegrityError: naming the first id that is in no place, or in two.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError(f"a {self.noun} is twice in the free list")
        if NULL_ID in free or references.get(NULL_ID, 0) or NULL_ID in cached:
            raise IntegrityError(f"the null {self.noun} is in use or in the free list")
        if cached != self._cached:
            odd = min(cached ^ self._cached)
            raise IntegrityError(f"{self.noun} {odd} is cached in one place only")
        for id_ in range(1, self.size):
            expected = references.get(id_, 0)
            if self._users[id_] != expected:
                raise IntegrityError(
                    f"{self.noun} {id_} counts {self._users[id_]} users but has {expected}"
                )
            place = (id_ in free, id_ in self._idle)
            if place != (not expected and id_ not in cached, not expected and id_ in cached):
                raise IntegrityError(f"{self.noun} {id_} has {expected} users and a wrong place")

    def _release(self, id_: int) -> None:
        self._free.append(id_)
        self.freed.append(id_)

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
