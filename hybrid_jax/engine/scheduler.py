"""Which sequences run in the next step, and how many tokens of each. No device work.

First come, first served: every running sequence is older than every waiting one. Both lists are
kept in order of arrival, so "the youngest running sequence" is the last one.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hybrid_jax.engine.cache_manager import CacheManager
from hybrid_jax.engine.types import ReleaseReason, Sequence, SequenceState

ChunkLimit = Callable[[Sequence, int], int]


def no_chunk_limit(sequence: Sequence, remaining: int) -> int:
    """Lets a prefill chunk be as long as the token budget allows."""
    del sequence
    return remaining


@dataclass
class Schedule:
    """The rows of one step. Each sequence's `num_scheduled_tokens` says how many tokens it has."""

    decode: dict[int, Sequence] = field(default_factory=dict)  # by arrival
    prefill: dict[int, Sequence] = field(default_factory=dict)  # by arrival
    admitted: list[Sequence] = field(default_factory=list)  # the part of `prefill` that is new
    preempted: list[Sequence] = field(default_factory=list)
    stalled: bool = False  # the youngest sequence found no room and waits in place
    num_tokens: int = 0

    @property
    def sequences(self) -> list[Sequence]:
        """All rows in batch order: decode rows, then prefill chunks."""
        return [*self.decode.values(), *self.prefill.values()]

    def split(self) -> "list[Schedule]":
        """Its decode rows and its prefill chunks, in steps of their own."""
        decode = Schedule(decode=self.decode, num_tokens=_scheduled(self.decode))
        prefill = Schedule(prefill=self.prefill, num_tokens=_scheduled(self.prefill))
        return [part for part in (decode, prefill) if part.num_tokens]

    def add(self, rows: dict[int, Sequence], sequence: Sequence, num_tokens: int) -> None:
        """Puts a sequence with `num_tokens` tokens into one of the two kinds of rows."""
        rows[sequence.arrival] = sequence
        sequence.num_scheduled_tokens = num_tokens
        self.num_tokens += num_tokens

    def drop(self, sequence: Sequence) -> None:
        """Takes a sequence out again, if it is in."""
        if self.decode.pop(sequence.arrival, None) or self.prefill.pop(sequence.arrival, None):
            self.num_tokens -= sequence.num_scheduled_tokens
            self.admitted = [s for s in self.admitted if s is not sequence]


class Scheduler:
    """The waiting queue, the running sequences, and the policy between them.

    Never livelocks: a sequence only ever preempts younger ones and otherwise waits in place, so
    the oldest one always progresses; and nothing is admitted in a step in which pages ran out.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_batched_tokens: int,
        tokens_per_decode: int = 1,
        chunk_limit: ChunkLimit = no_chunk_limit,
    ) -> None:
        """A decode row has `tokens_per_decode` tokens: the newest one and guesses.

        `chunk_limit(sequence, remaining)` bounds the next prefill chunk of a sequence.
        """
        self._cache = cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self._tokens_per_decode = tokens_per_decode
        self.chunk_limit = chunk_limit
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()  # by arrival
        self.running: dict[int, Sequence] = {}  # by arrival
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence; it must be younger than all others. Idempotent."""
        if sequence.state is SequenceState.WAITING:
            self.waiting[sequence.arrival] = sequence

    def remove(self, sequence: Sequence, reason: ReleaseReason) -> None:
        """Ends a sequence, wherever it is, and gives back what it holds. Idempotent."""
        self.waiting.pop(sequence.arrival, None)
        self.running.pop(sequence.arrival, None)
        self._cache.release(sequence, reason)
        sequence.state = SequenceState.FINISHED

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Queues all `sequences` from scratch, after the caches were lost.

        Tokens in flight are forgotten: sampling depends on seed and position only, so they come
        again. The cache manager must have been reset.
        """
        self.running.clear()
        self.waiting.clear()
        for sequence in sorted(sequences, key=lambda s: s.arrival):
            self._cache.detach(sequence)
            sequence.num_inflight = 0
            sequence.state = SequenceState.WAITING
            self.add(sequence)

    def schedule(self) -> Schedule:
        """The next step: decode rows, then prefills under way, then new ones, within the budget."""
        plan = Schedule()
        self._schedule_decode(plan)
        self._schedule_prefill(plan)
        if not plan.preempted and not plan.stalled:
            self._admit(plan)
        return plan

    def _schedule_decode(self, plan: Schedule) -> None:
        for sequence in list(self.running.values()):
            if sequence.state is not SequenceState.RUNNING or not sequence.is_decoding:
                continue  # preempted by an older one a moment ago, or prefilling
            count = self._tokens_per_decode
            if not sequence.is_exhausted and self._make_room(plan, sequence, count):
                plan.add(plan.decode, sequence, count)

    def _schedule_prefill(self, plan: Schedule) -> None:
        for sequence in list(self.running.values()):
            if sequence.state is not SequenceState.RUNNING or sequence.is_decoding:
                continue
            self._fork(plan, sequence)
            chunk = self._chunk(plan, sequence)
            if chunk and self._make_room(plan, sequence, chunk):
                plan.add(plan.prefill, sequence, chunk)

    def _fork(self, plan: Schedule, leader: Sequence) -> None:
        """Starts the other completions of a request where the first one is about to sample.

        They share the pages and read the state of all of the prompt but its last token, which each
        computes itself: its logits are what they sample from.
        """
        if not _at_fork(leader):
            return
        while self.waiting and plan.num_tokens + 1 < self._max_num_batched_tokens:
            sequence = next(iter(self.waiting.values()))
            if sequence.request is not leader.request or sequence.num_output_tokens:
                return
            self._cache.prefixes.fork(leader, sequence)
            if not self._cache.can_admit(sequence, self.running.values()):
                return
            if not self._start(plan, sequence):
                return

    def _admit(self, plan: Schedule) -> None:
        while self.waiting and self._cache.rows.num_free:
            sequence = next(iter(self.waiting.values()))
            if sequence.num_inflight or plan.num_tokens == self._max_num_batched_tokens:
                return  # what it continues from is not known yet, or the budget is spent
            self._cache.prefixes.find(sequence)
            if self._awaits_prefix(sequence) or not self._cache.can_admit(
                sequence, self.running.values()
            ):
                return
            if not self._start(plan, sequence):
                return

    def _start(self, plan: Schedule, sequence: Sequence) -> bool:
        """Makes a waiting sequence run, if there is room for its first chunk."""
        self._cache.attach(sequence)
        sequence.num_prefill_tokens = len(sequence.token_ids)
        chunk = self._chunk(plan, sequence)
        if not chunk or not self._cache.allocate(sequence, chunk):
            self._cache.release(sequence, ReleaseReason.PREEMPT)
            return False
        del self.waiting[sequence.arrival]
        self.running[sequence.arrival] = sequence
        sequence.state = SequenceState.RUNNING
        plan.admitted.append(sequence)
        plan.add(plan.prefill, sequence, chunk)
        self._cache.count(sequence)
        return True

    def _awaits_prefix(self, sequence: Sequence) -> bool:
        """Whether a running prefill is about to cache more of a waiting sequence than there is.

        Of requests that arrive together with the same new prefix only the first computes it. Makes
        that one keep its state where the two diverge.
        """
        assert sequence.prefix is not None
        if sequence.needs_prompt_logprobs:
            return False  # it reads no cache
        known = sequence.prefix.length
        for other in self.running.values():
            if other.request is sequence.request and _before_fork(other):
                return True
            if other.num_committed_tokens >= other.num_prefill_tokens:
                continue
            shared = self._cache.prefixes.shared_soon(sequence, other)
            if shared > max(known, other.num_committed_tokens):
                return True
        return False

    def _chunk(self, plan: Schedule, sequence: Sequence) -> int:
        """Tokens of the sequence's next prefill chunk; 0 when the budget is spent."""
        remaining = sequence.num_remaining_prefill
        wanted = min(remaining, max(1, self.chunk_limit(sequence, remaining)))
        left = self._max_num_batched_tokens - plan.num_tokens
        return self._cache.prefixes.grid.clip(
            sequence, min(wanted, left), may_wait=left < wanted and bool(plan.prefill)
        )

    def _make_room(self, plan: Schedule, sequence: Sequence, num_tokens: int) -> bool:
        """Allocates, preempting younger sequences, the youngest first, while pages run out."""
        while not self._cache.allocate(sequence, num_tokens):
            victim = next(reversed(self.running.values()))
            if victim is sequence:
                plan.stalled = True
                return False
            self._preempt(plan, victim)
        return True

    def _preempt(self, plan: Schedule, victim: Sequence) -> None:
        """Back to the head of the queue; what was lost is recomputed when there is room again.

        A token in flight still counts: it is appended when it arrives, and `_admit` waits for it.
        """
        plan.drop(victim)
        self._cache.preempt(victim)
        del self.running[victim.arrival]
        victim.state = SequenceState.WAITING
        victim.num_preemptions += 1
        self.waiting[victim.arrival] = victim
        self.waiting.move_to_end(victim.arrival, last=False)
        self.num_preemptions += 1
        plan.preempted.append(victim)


def _scheduled(rows: dict[int, Sequence]) -> int:
    return sum(sequence.num_scheduled_tokens for sequence in rows.values())


def _before_fork(leader: Sequence) -> bool:
    """Whether other completions of the request will be able to fork from this one."""
    return leader.num_computed_tokens < leader.num_prompt_tokens - 1


def _at_fork(leader: Sequence) -> bool:
    """Whether all of a prompt with several completions is computed but its last token."""
    return (
        leader.request.params.num_sequences > 1
        and 0 < leader.num_computed_tokens == leader.num_prompt_tokens - 1
        and not leader.num_output_tokens
    )
