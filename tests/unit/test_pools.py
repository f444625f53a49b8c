"""Pools hand out each id once, count users, and notice what is wrong."""

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_jax.cache.pools import PagePool, RowPool, SlotPool
from hybrid_jax.errors import IntegrityError


@pytest.mark.parametrize("size", [-1, 0, 1])
def test_a_pool_without_a_usable_id_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"got size {size}"):
        PagePool(size)


def test_the_null_id_is_never_handed_out_and_the_last_id_is() -> None:
    pool = PagePool(4)
    assert sorted(pool.alloc() for _ in range(3)) == [1, 2, 3]
    assert (pool.num_free, pool.num_used, pool.peak) == (0, 3, 3)
    with pytest.raises(IntegrityError, match="no page is free"):
        pool.alloc()


def test_the_id_freed_last_is_handed_out_next() -> None:
    pool = SlotPool(8)
    ids = [pool.alloc() for _ in range(5)]
    for id_ in ids:
        pool.free(id_)
    assert [pool.alloc() for _ in range(5)] == ids[::-1]


def test_a_shared_id_is_free_after_its_last_user() -> None:
    pool = PagePool(3)
    page = pool.alloc()
    pool.share(page)
    assert pool.users(page) == 2
    assert not pool.free(page)
    assert pool.num_used == 1
    assert pool.free(page)
    assert pool.num_used == 0


@pytest.mark.parametrize("id_", [-1, 0, 2, 3, 99])
def test_freeing_or_sharing_what_is_not_in_use_is_refused(id_: int) -> None:
    pool = RowPool(3)
    assert pool.alloc() == 1
    for operation in (pool.free, pool.share):
        with pytest.raises(IntegrityError, match=f"row {id_} is not in use"):
            operation(id_)


def test_integrity_names_the_id_that_is_wrong() -> None:
    pool = PagePool(4)
    page = pool.alloc()
    pool.check_integrity({page: 1})
    with pytest.raises(IntegrityError, match=f"page {page} counts 1 users but has 0"):
        pool.check_integrity({})
    with pytest.raises(IntegrityError, match="page 2 counts 0 users but has 1"):
        pool.check_integrity({page: 1, 2: 1})
    with pytest.raises(IntegrityError, match="null page"):
        pool.check_integrity({page: 1, 0: 1})
    pool._free.append(page)
    with pytest.raises(IntegrityError, match=f"page {page}"):
        pool.check_integrity({page: 1})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 20), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99)), max_size=80))
def test_any_history_keeps_every_id_in_one_place(
    size: int, operations: list[tuple[int, int]]
) -> None:
    pool, users = PagePool(size), Counter[int]()
    for operation, pick in operations:
        held = sorted(users)
        if operation == 0 and pool.num_free:
            page = pool.alloc()
            assert page not in users
            users[page] = 1
        elif held and operation == 1:
            pool.share(held[pick % len(held)])
            users[held[pick % len(held)]] += 1
        elif held:
            page = held[pick % len(held)]
            users[page] -= 1
            assert pool.free(page) == (users[page] == 0)
            users = +users
        pool.check_integrity(users)
        assert pool.num_free == size - 1 - len(users)


def test_allocating_and_freeing_take_no_longer_in_a_large_pool() -> None:
    def seconds(size: int) -> float:
        pool, best = PagePool(size), float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(2000):
                pool.free(pool.alloc())
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(1_000_000) < 5 * seconds(100)
