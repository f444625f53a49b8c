"""What is computed once and used again: which prefixes are cached, and where sequences start."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from hybrid_jax.cache.plan import pages_for
from hybrid_jax.cache.pools import IdPool
from hybrid_jax.cache.prefix import CacheReport, Node, Prefix, PrefixTree
from hybrid_jax.engine.cache_groups import PageGroup, StateGroup
from hybrid_jax.engine.prefill_grid import PrefillGrid
from hybrid_jax.engine.swap import SwapSpace
from hybrid_jax.engine.types import Checkpoint, Sequence
from hybrid_jax.specs import CacheSpec

if TYPE_CHECKING:
    from hybrid_jax.config import EngineConfig


class PrefixCache:
    """Takes full pages and states of sequences into the prefix tree, and finds them again.

    Pages are cached when the step that filled them is known to be good. A state is cached without a
    copy: the slot that holds it is handed over, and the sequence goes on in another slot.
    """

    def __init__(
        self,
        specs: SequenceOf[CacheSpec],
        page_groups: Mapping[int, PageGroup],
        state_groups: Mapping[int, StateGroup],
        config: "EngineConfig",
        swap: SwapSpace,
    ) -> None:
        self._page_groups = page_groups
        self._state_groups = state_groups
        self._swap = swap
        self._enabled = config.prefix_cache
        self._page_size = config.page_size
        self.grid = PrefillGrid(
            config.prefill_alignment,
            config.hit_granularity,
            config.checkpoint_interval if config.prefix_cache and state_groups else 0,
        )
        groups = {**page_groups, **state_groups}
        self.pools: list[IdPool] = [groups[i].pool for i in range(len(specs))]
        self.tree = PrefixTree(specs, self.pools, self._page_size, self.grid.granularity)
        self.kept: set[Prefix] = set()

    def find(self, sequence: Sequence) -> None:
        """Looks up how much of a waiting sequence is computed already: its `prefix`.

        Also decides where its prefill chunks end.
        """
        match = self.tree.match(sequence.token_ids)
        prefix, reason, granularity = match.prefix, match.reason, self.grid.granularity
        if prefix.length and any(
            group.pool.num_free - sum(map(group.pool.is_idle, prefix.ids[i])) < group.num_written
            for i, group in self._state_groups.items()
        ):
            prefix, reason = self.nothing, "no_free_slot"
        if not self._enabled:
            reason = "disabled"
        kept = sequence.request.prefix
        if kept is not None and kept in self.kept:
            # What a snapshot brings may not be what its tokens would compute: nothing else is it.
            better = sequence.began_restored or prefix.length < kept.length
            if better and kept.length < len(sequence.token_ids):
                prefix, reason, granularity = kept, "prompt_end", 1
        saved = self._swap.find(sequence, self.tree)
        if saved is not None and saved.length > prefix.length:
            prefix = saved
        if sequence.needs_prompt_logprobs:
            prefix, reason = self.nothing, "prompt_logprobs"
        sequence.prefix = prefix
        sequence.stops = self.grid.stops(sequence, match.shared)
        if not sequence.was_admitted:
            sequence.report = CacheReport(prefix.length, granularity, reason)

    @property
    def nothing(self) -> Prefix:
        """The prefix without tokens."""
        return Prefix(0, ((),) * len(self.pools))

    def shared_soon(self, sequence: Sequence, other: Sequence) -> int:
        """Tokens of a waiting sequence that the prefill of `other`, under way, is going to cache.

        Where states are cached, `other` is made to keep its own where the two diverge, if it has
        not passed that point.
        """
        if not self._enabled or other.began_restored:
            return 0
        ours, theirs, size = sequence.token_ids, other.token_ids, self._page_size
        most, shared = min(len(ours) - 1, other.num_prefill_tokens), 0
        while (
            shared + size <= most and ours[shared : shared + size] == theirs[shared : shared + size]
        ):
            shared += size
        shared = self.grid.align(shared)
        if not self._state_groups:
            return shared
        end = other.num_computed_tokens + other.num_scheduled_tokens
        if shared > end:
            other.stops = tuple(sorted({*other.stops, shared}))
            return shared
        kept = [c.length for c in other.checkpoints if c.length <= shared]
        if shared == end and end in other.stops:
            kept.append(end)
        return max(kept, default=0)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets a waiting sequence start where a running one with the same tokens is."""
        child.prefix = self.of(parent)
        if not child.was_admitted:
            child.report = CacheReport(child.prefix.length, 1, "prompt_end")

    def of(self, sequence: Sequence) -> Prefix:
        """All that a running sequence has computed, for others to go on from. Pins nothing."""
        sequence.may_share = True  # from now on somebody may read what it would write to
        ids: list[tuple[int, ...]] = []
        length = sequence.num_computed_tokens
        end = pages_for(length, self._page_size)  # the pages after it have seen guesses only
        for run, slots in zip(sequence.pages, sequence.slots, strict=True):
            if run is not None:
                ids.append(tuple(run[k] for k in range(run.first, end)))
            else:
                ids.append((slots.read,) if slots else ())
        return Prefix(length, tuple(ids), sequence.uid)

    def pin(self, prefix: Prefix) -> None:
        """Adds a user to all ids of a prefix, until `unpin`."""
        self.kept.add(prefix)
        for pool, ids in zip(self.pools, prefix.ids, strict=True):
            for id_ in ids:
                pool.share(id_)

    def unpin(self, prefix: Prefix) -> None:
        """Undoes `pin`. Idempotent."""
        if prefix in self.kept:
            self.kept.remove(prefix)
            for pool, ids in zip(self.pools, prefix.ids, strict=True):
                for id_ in reversed(ids):
                    pool.free(id_)

    def advance(self, sequence: Sequence, start: int, last: int) -> None:
        """Where a state is due, lets the next step write elsewhere, if there is a free slot.

        The tokens from `start` on were computed; the state after them is in the written slot
        `last`, and those after the tokens before it in the slots before that one.
        """
        length = self.grid.checkpoint(sequence, start)
        if not length:
            return
        if any(not group.pool.num_free for group in self._state_groups.values()):
            return
        kept = [0] * len(self.pools)
        for i, group in self._state_groups.items():
            slots = sequence.slots[i]
            assert slots is not None
            slot = kept[i] = slots.write[last - (sequence.num_computed_tokens - length)]
            group.pool.share(slot)
            group.write_elsewhere(sequence.row, slots, slot)
        sequence.checkpoints.append(Checkpoint(length, tuple(kept)))

    def commit(self, sequence: Sequence, before: int) -> None:
        """Caches what became certain after `before` tokens, of a generation once per grid cell.

        Later the window pages that a hit at the cell's end needs will be gone.
        """
        checkpoint, length = None, sequence.num_committed_tokens
        if sequence.checkpoints and sequence.checkpoints[0].length <= length:
            checkpoint = sequence.checkpoints.popleft()
        if length <= sequence.num_prefill_tokens or self.grid.align(length) > before:
            self._publish(sequence, checkpoint)

    def leave(self, sequence: Sequence, *, failed: bool) -> None:
        """Caches the pages of a sequence that gives them back, generated tokens included.

        What a failed sequence read or wrote is not cached any more.
        """
        if failed:
            node = self.tree.node(sequence.token_ids, self._page_size)
            if node is not self.tree.root:
                self.tree.forget(node)
        else:
            self._publish(sequence, None)
        for checkpoint in sequence.checkpoints:
            self._free(checkpoint)

    def _publish(self, sequence: Sequence, checkpoint: Checkpoint | None) -> None:
        """Caches full pages of committed tokens, and the state after them if it is at hand."""
        cacheable = self._enabled and sequence.is_good and not sequence.began_restored
        if cacheable and (self._page_groups or checkpoint is not None):
            node, size = sequence.node, self._page_size
            if node is None or not node.attached:
                node = self.tree.root
            for k in range(node.depth, sequence.num_committed_tokens // size):
                ids = [run[k] if run is not None else 0 for run in sequence.pages]
                tokens = tuple(sequence.token_ids[k * size : (k + 1) * size])
                node = self.tree.add(node, tokens, ids)
            if checkpoint is not None:
                self._publish_state(sequence, node, checkpoint)
            sequence.node = node
            self.tree.prune(node)
        if checkpoint is not None:
            self._free(checkpoint)

    def _publish_state(self, sequence: Sequence, node: Node, checkpoint: Checkpoint) -> None:
        """Of the states of its decoding, a sequence leaves only the last one behind."""
        while node.parent is not None and node.depth * self._page_size > checkpoint.length:
            node = node.parent  # several tokens were committed at once
        if not self.tree.add_state(node, checkpoint.slots, sequence.uid):
            return
        if checkpoint.length > sequence.num_prefill_tokens:
            last, sequence.decode_checkpoint = sequence.decode_checkpoint, node
            if last is not None and last.owner == sequence.uid:
                self.tree.drop_state(last)

    def _free(self, checkpoint: Checkpoint) -> None:
        for i, group in self._state_groups.items():
            group.pool.free(checkpoint.slots[i])
