"""Whether every page, slot and row is in exactly one place and every table mirrors its sequence."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hybrid_jax.engine.cache_manager import CacheManager
from hybrid_jax.engine.types import Sequence
from hybrid_jax.errors import IntegrityError


def check_integrity(cache: CacheManager, sequences: Iterable[Sequence]) -> None:
    """Compares pools, tables, prefix tree and sequences.

    Args:
        cache: what is checked.
        sequences: all that hold anything.

    Raises:
        IntegrityError: naming the first id or row that is wrong.
    """
    holders = [s for s in sequences if s.row]
    cache.rows.check_integrity(Counter(s.row for s in holders))
    owners, read_owners = np.zeros_like(cache.row_owners), np.zeros_like(cache.row_owners)
    for sequence in holders:
        owners[sequence.row] = sequence.uid
        read_owners[sequence.row] = cache.read_owners[sequence.row]
    _require_equal(owners, cache.row_owners, "row owners")
    _require_equal(read_owners, cache.read_owners, "read owners")
    cache.swap.check_integrity()
    cached = cache.prefixes.tree.check_integrity()
    for i in cache.page_groups:
        _check_pages(cache, i, holders, cached[i])
    for i in cache.state_groups:
        _check_slots(cache, i, holders, cached[i])


def _check_pages(cache: CacheManager, i: int, holders: list[Sequence], cached: set[int]) -> None:
    group = cache.page_groups[i]
    table, users = np.zeros_like(group.table), Counter[int]()
    for prefix in cache.prefixes.kept:
        users.update(prefix.ids[i])
    for sequence in holders:
        run = sequence.pages[i]
        assert run is not None
        users.update(run.ids)
        if run.first + len(run.ids) != sequence.num_pages:
            raise IntegrityError(f"sequence {sequence.uid} has a torn page run in group {i}")
        for k, page in enumerate(run.ids, run.first):
            table[sequence.row, k % group.width] = page
    group.pool.check_integrity(users, cached)
    _require_equal(table, group.table, f"page table of group {i}")


def _check_slots(cache: CacheManager, i: int, holders: list[Sequence], cached: set[int]) -> None:
    group = cache.state_groups[i]
    users = Counter[int]()
    for prefix in cache.prefixes.kept:
        users.update(prefix.ids[i])
    read, write = np.zeros_like(group.read), np.zeros_like(group.write)
    for sequence in holders:
        slots = sequence.slots[i]
        assert slots is not None
        users.update({slots.read, *slots.write})
        users.update(checkpoint.slots[i] for checkpoint in sequence.checkpoints)
        read[sequence.row], write[sequence.row] = slots.read, slots.write
    group.pool.check_integrity(users, cached)
    _require_equal(read, group.read, f"read slots of group {i}")
    _require_equal(write, group.write, f"write slots of group {i}")


def _require_equal(
    expected: npt.NDArray[np.int32], actual: npt.NDArray[np.int32], what: str
) -> None:
    if not np.array_equal(expected, actual):
        row = int(np.argwhere(expected != actual)[0][0])
        raise IntegrityError(f"{what}: row {row} does not mirror its sequence")
