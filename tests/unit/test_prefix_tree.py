"""The prefix tree against a dictionary of prefixes, under any history of use and eviction."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid_jax.cache.pools import IdPool, PagePool, SlotPool
from hybrid_jax.cache.prefix import Node, PrefixTree
from hybrid_jax.errors import IntegrityError
from hybrid_jax.specs import PagedSpec, StateArray, StateSpec, WindowSpec

PAGE, GRANULARITY, WINDOW = 2, 4, 3
FULL = PagedSpec(1, 8, "float32")
WINDOWED = WindowSpec(1, 8, "float32", WINDOW)
STATE = StateSpec((StateArray("recurrent", (1, 4, 4), "float32"),))


class TreeMachine(RuleBasedStateMachine):
    """Publishes, pins, unpins and evicts; a model remembers what each prefix holds.

    The model: (tokens of the prefix, group) -> id. Eviction is told to it by the pools.
    """

    @initialize(stack=st.sampled_from([(FULL, WINDOWED, STATE), (FULL,), (FULL, STATE)]))
    def start(self, stack: tuple[Any, ...]) -> None:
        self.specs = stack
        self.pools: list[IdPool] = [
            SlotPool(4) if isinstance(s, StateSpec) else PagePool(10) for s in stack
        ]
        self.tree = PrefixTree(stack, self.pools, PAGE, GRANULARITY)
        self.held: list[tuple[int, int]] = []  # (group, id), one entry per user
        self.model: dict[tuple[tuple[int, ...], int], int] = {}
        for g, pool in enumerate(self.pools):
            pool.on_evict = self.noting(g, pool.on_evict)

    def noting(self, g: int, evict: Any) -> Any:
        def note(id_: int) -> None:
            (prefix,) = (p for (p, group), held in self.model.items() if (group, held) == (g, id_))
            if self.specs[g] == FULL:  # takes all that begins with it along
                gone = [key for key in self.model if key[0][: len(prefix)] == prefix]
            else:
                gone = [(prefix, g)]
            for key in gone:
                del self.model[key]
            evict(id_)

        return note

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=8), state=st.booleans())
    def publish(self, tokens: list[int], state: bool) -> None:
        """As a sequence does that computed all of `tokens`, or all that there is room for."""
        node: Node = self.tree.root
        for end in range(PAGE, len(tokens) + 1, PAGE):
            prefix = tuple(tokens[:end])
            pages = [g for g, spec in enumerate(self.specs) if spec != STATE]
            if not node.attached or any(not self.pools[g].num_free for g in pages):
                return  # what comes before was just evicted, or there is no room
            ids = [0 if spec == STATE else self.take(g) for g, spec in enumerate(self.specs)]
            if not node.attached:
                return
            node = self.tree.add(node, prefix[-PAGE:], ids)
            for g, id_ in enumerate(ids):
                if id_:
                    self.model.setdefault((prefix, g), id_)
        g = len(self.specs) - 1
        if state and self.specs[g] == STATE and self.pools[g].num_free and node.depth % 2 == 0:
            slot = self.take(g)
            if node is not self.tree.root and node.attached:
                added = self.tree.add_state(node, [0] * g + [slot], 7)
                key = (tuple(tokens[: node.depth * PAGE]), g)
                assert added == (key not in self.model)
                self.model.setdefault(key, slot)

    def take(self, g: int) -> int:
        id_ = self.pools[g].alloc()
        self.held.append((g, id_))
        return id_

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 10**6), many=st.booleans())
    def let_go(self, pick: int, many: bool) -> None:
        for _ in range(8 if many else 1):
            if self.held:
                g, id_ = self.held.pop(pick % len(self.held))
                self.pools[g].free(id_)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def hit(self, tokens: list[int]) -> None:
        """The longest prefix for which the model has everything, found by trying all of them."""
        match = self.tree.match(tokens)
        most = (len(tokens) - 1) // GRANULARITY * GRANULARITY
        usable = [n for n in range(0, most + 1, PAGE) if self.has_all(tokens, n)]
        assert match.prefix.length == max(usable)
        for g, ids in enumerate(match.prefix.ids):
            end = match.prefix.length
            for k, id_ in enumerate(reversed(ids)):
                assert self.model[(tuple(tokens[: end - k * PAGE]), g)] == id_
                self.pools[g].share(id_)
                self.held.append((g, id_))
        if match.prefix.length == most:
            assert match.reason == "prompt_end"

    def has_all(self, tokens: list[int], length: int) -> bool:
        if length % GRANULARITY:
            return False
        for g, spec in enumerate(self.specs):
            if spec == STATE:
                needed = {length} - {0}
            else:
                first = max(0, length - WINDOW + 1) if spec == WINDOWED else 0
                needed = set(range(first // PAGE * PAGE + PAGE, length + 1, PAGE))
            if any((tuple(tokens[:n]), g) not in self.model for n in needed):
                return False
        return True

    @invariant()
    def every_id_is_in_one_place(self) -> None:
        if not hasattr(self, "tree"):
            return
        cached = self.tree.check_integrity()
        for g, pool in enumerate(self.pools):
            assert cached[g] == {id_ for (_, group), id_ in self.model.items() if group == g}
            pool.check_integrity(Counter(i for group, i in self.held if group == g), cached[g])

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            for g, id_ in self.held:
                self.pools[g].free(id_)
            self.tree.clear()
            assert all(p.num_free == p.capacity and not p.num_idle for p in self.pools)


TreeMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True
)
TestTree = TreeMachine.TestCase


def test_the_least_recently_used_page_is_evicted_first() -> None:
    pool = PagePool(4)
    evicted: list[int] = []

    def evict(id_: int) -> None:
        evicted.append(id_)
        pool.uncache(id_)

    pool.on_evict = evict
    pages = [pool.alloc() for _ in range(3)]
    for page in pages:
        pool.cache(page)
        pool.free(page)
    pool.share(pages[0])  # used again
    pool.free(pages[0])
    assert pool.num_free == 3
    assert [pool.alloc() for _ in range(3)] == evicted == [pages[1], pages[2], pages[0]]
    with pytest.raises(IntegrityError, match="no page is free"):
        pool.alloc()


def test_a_torn_tree_is_noticed() -> None:
    pools = [PagePool(5), SlotPool(5)]
    tree = PrefixTree((FULL, STATE), pools, PAGE, GRANULARITY)
    node = tree.add(tree.root, (1, 2), [pools[0].alloc(), 0])
    tree.check_integrity()
    page, node.ids[0] = node.ids[0], 0
    with pytest.raises(IntegrityError, match="prefix of 1 pages is torn"):
        tree.check_integrity()
    node.ids[0] = page + 1
    with pytest.raises(IntegrityError, match="in its index only"):
        tree.check_integrity()
