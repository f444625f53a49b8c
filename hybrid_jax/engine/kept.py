"""Computed tokens that outlive their sequence: what forks, sessions and snapshots are made of."""

import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np

from hybrid_jax.cache.prefix import Prefix
from hybrid_jax.cache.snapshot import Snapshot
from hybrid_jax.engine.cache_manager import CacheManager
from hybrid_jax.engine.types import MAX_UID, Sequence, StepRunner, TokenEvent
from hybrid_jax.errors import SnapshotError, SnapshotTooLarge


class KeptPrefixes:
    """Makes, shares and drops kept prefixes; moves them to the host and back.

    A kept prefix belongs to whoever asked for it, until it is dropped or given to a request
    (`Request.prefix`), which drops it when it ends. It pins its pages and slots: nobody else can
    have them. It is void, and computed again when used, once the engine had to recover.
    """

    def __init__(self, runner: StepRunner, cache: CacheManager) -> None:
        self._runner = runner
        self._cache = cache
        self._owners = itertools.count(MAX_UID, -1)  # of restored states; far from sequences' uids

    @property
    def hint(self) -> str:
        """What to do when there is no room: the end of a sentence, empty if nothing is kept."""
        kept = self._cache.prefixes.kept
        tokens = sum(prefix.length for prefix in kept)
        return f"; {len(kept)} sessions hold {tokens} tokens, close some" if kept else ""

    def keep(self, sequence: Sequence) -> Prefix:
        """Keeps what a running sequence has computed. It may go on: it writes elsewhere then.

        One that was preempted while its last token was under way has nothing: its prefix is void.
        """
        if not sequence.row:
            return Prefix(0, ())
        prefix = self._cache.prefixes.of(sequence)
        tokens = tuple(sequence.token_ids[: prefix.length])
        prefix = replace(prefix, token_ids=tokens, restored=sequence.began_restored)
        self._cache.prefixes.pin(prefix)
        return prefix

    def holds(self, prefix: Prefix) -> bool:
        """Whether the memory of a prefix is still there."""
        return prefix in self._cache.prefixes.kept

    def share(self, prefix: Prefix) -> Prefix:
        """A second hold on the same memory: a fork of what follows. That of a void one is void."""
        copy = replace(prefix)
        if self.holds(prefix):
            self._cache.prefixes.pin(copy)
        return copy

    def drop(self, prefix: Prefix) -> None:
        """Gives back the memory, unless others hold it. Idempotent."""
        self._cache.prefixes.unpin(prefix)

    def end(self, sequence: Sequence, event: TokenEvent) -> TokenEvent:
        """A sequence ends with `event`: keeps what it computed if its request asked for that."""
        request = sequence.request
        if request.keep and event.finish_reason in ("stop", "length"):
            event = replace(event, kept=self.keep(sequence))
        if request.prefix is not None:
            self.drop(request.prefix)
        return event

    def snapshot(self, prefix: Prefix, token_ids: SequenceOf[int]) -> Snapshot:
        """Copies what a kept prefix of `token_ids` holds to the host; waits for steps under way.

        Raises:
            SnapshotError: the prefix is void.
        """
        if not self.holds(prefix):
            raise SnapshotError("the session's memory is gone; generate once more to compute it")
        arrays: dict[str, np.ndarray] = {}
        for group, ids in enumerate(prefix.ids):
            arrays |= self._runner.read(group, ids)
        model, page_size = self._runner.fingerprint, self._cache.page_size
        return Snapshot(tuple(token_ids), prefix.length, model, page_size, arrays)

    def restore(self, snapshot: Snapshot) -> Prefix:
        """Puts a snapshot into pages and slots of this engine.

        Raises:
            SnapshotError: it is of another model, dtype or page size, or damaged.
            SnapshotTooLarge: it does not fit.
        """
        counts = snapshot.check(self._runner, self._cache.page_size)
        pools = self._cache.pools
        for group, (pool, count) in enumerate(zip(pools, counts, strict=True)):
            if pool.num_free < count:
                raise SnapshotTooLarge(
                    f"the snapshot needs {count} {pool.noun}s of cache group {group} and "
                    f"{pool.num_free} are free; close sessions or give the caches more memory"
                )
        owner = next(self._owners)
        ids = tuple(
            tuple(pool.alloc() for _ in range(count))
            for pool, count in zip(pools, counts, strict=True)
        )
        length = snapshot.length
        prefix = Prefix(length, ids, owner, snapshot.token_ids[:length], restored=True)
        self._cache.prefixes.kept.add(prefix)
        try:
            for group, some in enumerate(ids):
                self._runner.write(group, some, snapshot.arrays, owner)
        except Exception:
            self.drop(prefix)  # nobody else knows of it
            raise
        return prefix
