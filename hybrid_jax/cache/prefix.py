"""Which prefixes the caches still hold: a tree over full pages of token ids. Host only."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from hybrid_jax.cache.plan import first_live_page
from hybrid_jax.cache.pools import IdPool
from hybrid_jax.errors import IntegrityError
from hybrid_jax.specs import CacheSpec, StateSpec, WindowSpec

HitLimit = Literal[
    "prompt_end",  # what remains is the last token, or less than the granularity
    "no_match",  # other tokens follow in everything that is cached
    "no_state_checkpoint",  # the pages of more tokens are there, but no state row
    "window_evicted",  # the pages of more tokens are there, but not those of a window before them
    "no_free_slot",  # the state row was there, but no second one to write to
    "prompt_logprobs",  # they were asked for, and what is cached has none
    "disabled",  # prefix_cache is off
]


@dataclass(frozen=True)
class CacheReport:
    """How much of a prompt was not computed because the caches had it, and why not more."""

    cached_tokens: int
    granularity: int  # hits are multiples of so many tokens
    reason: HitLimit


@dataclass(frozen=True, eq=False)
class Prefix:
    """Computed tokens in the caches that a sequence can go on from.

    `ids` has one entry per cache group: the last pages of the prefix, consecutive (a window group
    needs only those its window covers), or the one slot of its state. A prefix of the tree pins
    nothing; a kept one pins its ids for whoever holds it.
    """

    length: int
    ids: tuple[tuple[int, ...], ...]
    owner: int = 0  # uid that wrote the state
    token_ids: tuple[int, ...] = ()  # of a kept prefix
    restored: bool = False  # whether it began with a snapshot: nobody knows what that really holds
    missing: tuple[int, ...] = ()  # ids per group that follow `ids`: the host has what they held


@dataclass(frozen=True)
class Match:
    """What the tree knows of a prompt."""

    prefix: Prefix
    shared: int  # tokens, in full pages, that some cached prompt begins with as well
    reason: HitLimit


class Node:
    """One page-aligned prefix: that of its parent and one more page of tokens."""

    __slots__ = ("attached", "children", "depth", "ids", "owner", "parent", "tokens")

    def __init__(self, parent: "Node | None", tokens: tuple[int, ...], num_groups: int) -> None:
        self.parent = parent
        self.tokens = tokens  # of the last page
        self.depth: int = parent.depth + 1 if parent else 0  # pages
        self.children: dict[tuple[int, ...], Node] = {}
        self.ids = [0] * num_groups  # the last page, or the slot, per cache group; 0: not cached
        self.owner = 0  # uid that wrote the state
        self.attached = True


class PrefixTree:
    """Cached pages and state rows by the tokens they belong to.

    Pools decide what is evicted, the least recently used first: a full-attention page takes
    everything below it along, since nothing there can be reached any more; a window page or a
    state row only itself.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], pools: Sequence[IdPool], page_size: int, granularity: int
    ) -> None:
        """Listens to the evictions of `pools`. Hits are multiples of `granularity` tokens."""
        self.page_size = page_size
        self.granularity = granularity
        self._pools = pools
        self._states = [g for g, spec in enumerate(specs) if isinstance(spec, StateSpec)]
        self._windows = {g: s.window for g, s in enumerate(specs) if isinstance(s, WindowSpec)}
        partly = {*self._states, *self._windows}
        self._full = [g for g in range(len(specs)) if g not in partly]
        self._holders: list[dict[int, Node]] = [{} for _ in specs]  # id -> node, per group
        self.root = Node(None, (), len(specs))
        for g, pool in enumerate(pools):
            pool.on_evict = partial(self._evict, g)

    def match(self, token_ids: Sequence[int]) -> Match:
        """The longest cached prefix that leaves a token to compute. Pins nothing."""
        most = (len(token_ids) - 1) // self.granularity * self.granularity // self.page_size
        path = self._path(token_ids, most)
        depth, with_state = self._deepest(path)
        if depth == most:
            reason: HitLimit = "prompt_end"
        elif depth == len(path):
            reason = "no_match"
        elif with_state > depth or not self._states:
            reason = "window_evicted"
        else:
            reason = "no_state_checkpoint"
        return Match(self._prefix(path[:depth]), len(path) * self.page_size, reason)

    def full_pages(self, token_ids: Sequence[int], length: int) -> tuple[tuple[int, ...], ...]:
        """Per group the cached full-attention pages of the first `length` tokens. Pins nothing."""
        path = self._path(token_ids, length // self.page_size)
        return tuple(
            tuple(node.ids[g] for node in path) if g in self._full else ()
            for g in range(len(self._pools))
        )

    def node(self, token_ids: Sequence[int], length: int) -> Node:
        """The node of the first `length` tokens, or the deepest one that exists before it."""
        path = self._path(token_ids, length // self.page_size)
        return path[-1] if path else self.root

    def add(self, parent: Node, tokens: tuple[int, ...], ids: Sequence[int]) -> Node:
        """The prefix of `parent` with one more page. `ids` per group fill what is not cached yet.

        The ids must be in use. Ids of prefixes that are cached already are left to their users.
        """
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent, tokens, len(self._pools))
        for g, id_ in enumerate(ids):
            if id_ and not node.ids[g]:
                node.ids[g] = id_
                self._holders[g][id_] = node
                self._pools[g].cache(id_)
        return node

    def add_state(self, node: Node, ids: Sequence[int], owner: int) -> bool:
        """Makes the slots in `ids` (per group, 0 for page groups) the state after `node`.

        Returns False, changing nothing, if the node has one already.
        """
        if any(node.ids[g] for g in self._states):
            return False
        if node.parent is not None:
            self.add(node.parent, node.tokens, ids)
        node.owner = owner
        return True

    def drop_state(self, node: Node) -> None:
        """Forgets the state after `node`, if there is one."""
        for g in self._states:
            self._drop(node, g)
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Takes out `node` and those before it that hold nothing and lead nowhere."""
        while node.parent is not None and not node.children and not any(node.ids):
            parent = node.parent
            if node.attached:
                self.forget(node)
            node = parent

    def forget(self, node: Node) -> None:
        """Forgets a prefix and all that begin with it."""
        assert node.parent is not None
        del node.parent.children[node.tokens]
        below = [node]
        while below:
            node = below.pop()
            below.extend(node.children.values())
            for g in range(len(self._pools)):
                self._drop(node, g)
            node.attached = False

    def clear(self) -> None:
        """Forgets everything."""
        for child in list(self.root.children.values()):
            self.forget(child)

    def check_integrity(self) -> list[set[int]]:
        """The cached ids per group.

        Raises:
            IntegrityError: a node and an index disagree, or a node holds nothing.
        """
        found: list[dict[int, Node]] = [{} for _ in self._pools]
        nodes = list(self.root.children.values())
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            for g, id_ in enumerate(node.ids):
                if id_:
                    found[g][id_] = node
            missing = any(not node.ids[g] for g in self._full)
            if not node.attached or missing or not (node.children or any(node.ids)):
                raise IntegrityError(f"the cached prefix of {node.depth} pages is torn")
            if len({bool(node.ids[g]) for g in self._states}) > 1:
                raise IntegrityError(f"the checkpoint after {node.depth} pages is torn")
        if found != self._holders:
            raise IntegrityError("a cached id is in the tree or in its index only")
        return [set(ids) for ids in found]

    def _path(self, token_ids: Sequence[int], most: int) -> list[Node]:
        """The nodes along `token_ids`, at most `most`."""
        path: list[Node] = []
        node, size = self.root, self.page_size
        for start in range(0, most * size, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            path.append(node := child)
        return path

    def _deepest(self, path: list[Node]) -> tuple[int, int]:
        """Pages of the longest usable prefix, and of the longest one with a state."""
        usable = with_state = 0
        covered = dict.fromkeys(self._windows, 0)  # consecutive window pages up to here
        for depth, node in enumerate(path, 1):
            whole = True
            for g, window in self._windows.items():
                covered[g] = covered[g] + 1 if node.ids[g] else 0
                first = first_live_page(depth * self.page_size, window, self.page_size)
                whole &= covered[g] >= depth - first
            if all(node.ids[g] for g in self._states):
                with_state = depth
                if whole and not depth * self.page_size % self.granularity:
                    usable = depth
        return usable, with_state

    def _prefix(self, path: list[Node]) -> Prefix:
        length = len(path) * self.page_size
        if not path:
            return Prefix(0, ((),) * len(self._pools))
        ids: list[tuple[int, ...]] = []
        for g in range(len(self._pools)):
            first = 0
            if g in self._windows:
                first = first_live_page(length, self._windows[g], self.page_size)
            elif g in self._states:
                first = len(path) - 1
            ids.append(tuple(node.ids[g] for node in path[first:]))
        return Prefix(length, tuple(ids), path[-1].owner)

    def _evict(self, g: int, id_: int) -> None:
        node = self._holders[g][id_]
        if g in self._full:
            self.forget(node)
        elif g in self._windows:
            self._drop(node, g)
            self.prune(node)
        else:
            self.drop_state(node)

    def _drop(self, node: Node, g: int) -> None:
        id_ = node.ids[g]
        if id_:
            node.ids[g] = 0
            del self._holders[g][id_]
            self._pools[g].uncache(id_)
