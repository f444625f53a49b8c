"""The batching loop: schedule, build, launch the next step, then finish the previous one."""

import logging
from collections.abc import Collection

from hybrid_jax.cache.prefix import Prefix
from hybrid_jax.engine.accounting import take_snapshot, take_stats
from hybrid_jax.engine.batch_builder import BatchBuilder
from hybrid_jax.engine.cache_manager import CacheManager
from hybrid_jax.engine.in_flight import InFlight, LaunchedRow, Sample, prompt_spans
from hybrid_jax.engine.inbox import Arrival, Inbox
from hybrid_jax.engine.integrity import check_integrity
from hybrid_jax.engine.interrupts import uninterrupted
from hybrid_jax.engine.kept import KeptPrefixes
from hybrid_jax.engine.outputs import OutputProcessor
from hybrid_jax.engine.scheduler import Schedule, Scheduler
from hybrid_jax.engine.speculation import Speculation
from hybrid_jax.engine.step_clock import StepClock
from hybrid_jax.engine.step_memory import StepMemory
from hybrid_jax.engine.types import (
    EngineStats,
    ReleaseReason,
    Request,
    Sequence,
    SequenceState,
    StepRunner,
    TokenEvent,
    Tokenizer,
)
from hybrid_jax.engine.validation import RequestValidator
from hybrid_jax.errors import (
    CachesFull,
    EngineDead,
    InvalidRequest,
    NonFiniteLogits,
    NothingToSample,
    StateOwnerMismatch,
    StepFailed,
)
from hybrid_jax.memory.snapshot import MemorySnapshot
from hybrid_jax.structured import GrammarCompiler

logger = logging.getLogger(__name__)


class Engine:
    """Runs many requests on one runner. Host only; reads device arrays when a step is finished.

    `add_request`, `abort` and `stats` may be called from any thread; everything else from one.
    `config` and `model_config` are the runner's; `kept` has the prefixes that outlive requests.
    """

    def __init__(
        self,
        runner: StepRunner,
        tokenizer: Tokenizer | None,
        *,
        stop_ids: Collection[int] | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Takes ownership of `runner`, whose config is resolved.

        Args:
            tokenizer: makes text of tokens; None: events have no text.
            stop_ids: tokens that end a completion; None: the model's `eos_token_ids`.
            grammars: for structured output; None: such requests are refused.

        Raises ModelError if a cache group has no room for a single token.
        """
        config, model = runner.config, runner.model_config
        self._runner = runner
        self._sampling = runner.sampling_rows
        stop_ids = tuple(model.eos_token_ids if stop_ids is None else stop_ids)
        self.config, self.model_config = config, model
        self._cache = CacheManager(
            runner.groups, runner.sizes, config, on_row_release=self._sampling.clear_row
        )
        self._scheduler = Scheduler(
            self._cache,
            max_num_batched_tokens=config.max_num_batched_tokens,
            tokens_per_decode=config.tokens_per_decode,
        )
        self._speculation = Speculation(config)
        self.kept = KeptPrefixes(runner, self._cache)
        self._memory = StepMemory(runner, self._cache, config, stop_ids)
        self._builder = BatchBuilder(self._cache, config, model.vocab_size)
        self._outputs = OutputProcessor(tokenizer, stop_ids)
        self._validator = RequestValidator(runner, self._cache, tokenizer is not None, grammars)
        self._inbox = Inbox(self._validator, config)
        self._in_flight: list[InFlight] = []
        self._events: list[TokenEvent] = []
        self._num_steps = 0
        self._clock = StepClock()
        runner.prepare(self._builder.padding_batches())

    @property
    def dead(self) -> EngineDead | None:
        """Why nothing is accepted any more."""
        return self._inbox.dead

    def validate(self, request: Request) -> None:
        """Raises InvalidRequest if `add_request` would."""
        self._validator.check(request)

    def add_request(self, request: Request) -> None:
        """Accepts a request, which from now on ends in exactly one final event.

        Raises:
            InvalidRequest: it can never be served, or its id is in use.
            QueueFull: `max_queue` sequences wait already.
            EngineDead: the engine accepts nothing any more.
        """
        self._inbox.add(request, num_queued=len(self._scheduler.waiting))

    def abort(self, request_id: str) -> bool:
        """Ends a request at the next `step` or `drain_inbox`; False if it is unknown or ended."""
        return self._inbox.abort(request_id)

    def has_work(self) -> bool:
        """Whether `step` has something to do or events to give."""
        return bool(self._inbox.requests or self._events)

    def step(self) -> list[TokenEvent]:
        """Launches the next step, finishes the previous one and returns what is new.

        An interrupt loses nothing but time: all running sequences are computed again.
        """
        self._clock.start()
        try:
            if self._inbox.items:  # else it would put SIGINT off for nothing
                self.drain_inbox()
            if any(step.constrains for step in self._in_flight):
                self._finish_in_flight()
            steps = self._launch()
            self._clock.lap("launch")
            if self.config.run_ahead:
                steps, self._in_flight = self._in_flight, steps
            self._finish(steps)
        except BaseException:
            self._recover()
            raise
        if not self._inbox.requests:
            self._in_flight = []  # holds tokens of ended sequences only
        if self.config.debug_poison:
            self.check_integrity()
        events, self._events = self._events, []
        return events

    @uninterrupted()
    def drain_inbox(self) -> None:
        """Queues new requests and ends aborted ones, without running a step."""
        for item in self._inbox.take():
            if isinstance(item, Arrival):
                self._outputs.open(item.sequences[0].request)
                for sequence in item.sequences:
                    self._scheduler.add(sequence)
            else:
                for sequence in item.sequences:
                    if sequence.state is not SequenceState.FINISHED:
                        self._end(sequence, ReleaseReason.ABORT, self._outputs.abort(sequence))

    def hold(self, request_id: str) -> Prefix:
        """Keeps what a running request of one completion has computed, to fork or snapshot it.

        Raises InvalidRequest if nothing of it is computed, or it ended.
        """
        self._finish_in_flight()  # so that all computed tokens are known
        for sequence in self._inbox.requests.get(request_id, ()):
            if sequence.row:
                return self.kept.keep(sequence)
        raise InvalidRequest(f"request {request_id!r} is not running; hold it before it ends")

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        return take_stats(
            self._cache,
            self._scheduler,
            self._speculation,
            waiting=self._inbox.num_waiting + len(self._scheduler.waiting),
            steps=self._num_steps,
            compiles=self._runner.num_compiles,
            phase_seconds=dict(self._clock.seconds),
        )

    def memory(self) -> MemorySnapshot:
        """What pools and device hold, in bytes. Between steps only."""
        return take_snapshot(self._runner, self._cache, self._scheduler.running.values())

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page, slot and row is in exactly one place."""
        check_integrity(self._cache, self._scheduler.running.values())

    def clear_prefix_cache(self) -> None:
        """Forgets all cached prefixes; what running sequences use stays theirs."""
        self._cache.prefixes.tree.clear()

    def close(self) -> None:
        """Aborts everything and accepts nothing any more. Idempotent."""
        self._inbox.close(EngineDead("the engine is closed; make a new one"))
        self.drain_inbox()
        self._in_flight = []

    def _launch(self) -> list[InFlight]:
        plan = self._scheduler.schedule()
        self._memory.swap_out(plan.preempted)
        if not plan.num_tokens:
            if not self._in_flight:
                self._fail_stuck()
            return []
        self._speculation.draft(plan.decode.values())
        try:
            self._memory.prepare(plan.admitted)
            return [self._launch_step(part) for part in self._speculation.steps(plan)]
        except Exception as error:
            self._fail_step(plan.sequences, error)
            return []

    def _launch_step(self, plan: Schedule) -> InFlight:
        output = self._runner.step(self._builder.build(plan), self._sampling.device())
        self._num_steps += 1
        spans = prompt_spans(plan)
        verifies = bool(plan.decode) and self.config.tokens_per_decode > 1
        rows = [_launched(self._cache, s, verifies=verifies) for s in plan.sequences]
        return InFlight(rows, spans, output)

    def _finish_in_flight(self) -> None:
        steps, self._in_flight = self._in_flight, []
        self._finish(steps)

    def _finish(self, steps: list[InFlight]) -> None:
        rows = [row for step in steps for row in step.rows]
        try:
            results = [result for step in steps for result in step.read()]
        except Exception as error:
            self._fail_step([row.sequence for row in rows], error)
            return
        self._clock.lap("wait")
        with uninterrupted():
            for row, result in zip(rows, results, strict=True):
                if row.sequence.state is SequenceState.FINISHED:
                    continue  # ended while this step was in flight: its token is dropped
                row.sequence.num_inflight -= row.samples
                if result.owner_ok:
                    self._take(row, result.samples)
                else:
                    self._quarantine(row.sequence, _owner_mismatch(row.sequence))
            self._clock.lap("output")

    def _take(self, row: LaunchedRow, samples: list[Sample]) -> None:
        """Appends what a row sampled, up to the end of its sequence; commits what it computed."""
        sequence, drafts, taken, end = row.sequence, row.drafts or [], 0, None
        if row.drafts is not None:
            self._speculation.verified(sequence, drafts)
        for sample in samples if row.samples else ():
            if not sample.finite:
                self._quarantine(sequence, _non_finite(sequence))
                return
            if sample.usable and sample.token in drafts[taken : taken + 1]:
                self._speculation.accepted(sequence)  # the event may tell its number
            taken += 1
            event = self._append(sequence, sample)
            if event is None:
                return
            if event.finish_reason is not None:
                end = event
                break
            self._events.append(event)
        if row.drafts is not None:
            self._cache.advance(sequence, verified=taken)
        self._cache.commit(sequence, row.num_tokens + max(0, taken - 1), good=samples[0].finite)
        if end is not None:
            self._end(sequence, ReleaseReason.FINISH, end)

    def _append(self, sequence: Sequence, sample: Sample) -> TokenEvent | None:
        """The event of one more token; None if the sequence failed."""
        if not sample.usable:  # its memory is good, so it is released like any other
            return self._outputs.fail(sequence, _nothing_to_sample(sequence))
        try:
            if not 0 <= sample.token < (size := self.model_config.vocab_size):
                raise StepFailed(f"token {sample.token} was sampled from {size} tokens")
            return self._outputs.append(sequence, sample.token, sample.logprob)
        except Exception as error:  # for example a tokenizer's: nobody else is to suffer
            logger.exception("request %s failed", sequence.request.request_id)
            self._fail(sequence, error)
            return None

    def _end(self, sequence: Sequence, reason: ReleaseReason, event: TokenEvent) -> None:
        event = self.kept.end(sequence, event)
        self._scheduler.remove(sequence, reason)
        if event.final:
            self._inbox.ended(sequence.request.request_id)
        self._events.append(event)

    @uninterrupted()
    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self._end(sequence, ReleaseReason.FAILURE, self._outputs.fail(sequence, error))

    def _quarantine(self, sequence: Sequence, error: Exception) -> None:
        """Ends a sequence whose memory cannot be trusted and clears that, before it is reused."""
        self._fail(sequence, error)
        self._memory.clear_freed()

    def _fail_stuck(self) -> None:
        """Fails the oldest sequence if nothing can run and nothing is about to change."""
        for sequence in [*self._scheduler.running.values(), *self._scheduler.waiting.values()][:1]:
            logger.error("sequence %d cannot be scheduled although nothing else runs", sequence.uid)
            cls = CachesFull if self.kept.hint else StepFailed
            self._fail(sequence, cls(f"there is no room even alone{self.kept.hint}"))

    def _fail_step(self, sequences: list[Sequence], error: Exception) -> None:
        """Ends the sequences of a step that raised; everybody else is computed again."""
        logger.error("a step with %d rows failed", len(sequences), exc_info=error)
        for sequence in sequences:
            if sequence.state is not SequenceState.FINISHED:
                self._fail(sequence, _step_failed(error))
        self._recover()

    @uninterrupted()
    def _recover(self) -> None:
        """Starts all live sequences again on fresh caches; what was lost comes out the same."""
        self._in_flight = []
        with self._inbox.lock:
            self.drain_inbox()
            for request_id in [r for r in self._inbox.requests if not self._outputs.is_open(r)]:
                self._inbox.ended(request_id)  # its final event is out
            live = [s for sequences in self._inbox.requests.values() for s in sequences]
        live = [s for s in live if self._outputs.is_open(s.request.request_id, s.index)]
        self._cache.reset()
        for row in range(1, self._cache.rows.size):
            self._sampling.clear_row(row)
        self._scheduler.reset(live)
        try:
            self._runner.reset()
        except Exception as error:
            logger.exception("the engine cannot recover")
            self._die(f"its caches could not be made again: {error}")

    def _die(self, reason: str) -> None:
        error = EngineDead(f"the engine died, {reason}; make a new one")
        with self._inbox.lock:
            self._inbox.dead = error
            self.drain_inbox()  # nothing enters after this
        for sequence in list(self._scheduler.waiting.values()):
            self._fail(sequence, error)


def _launched(cache: CacheManager, sequence: Sequence, *, verifies: bool) -> LaunchedRow:
    """A sequence's row of a launched step; counts what is certain of its tokens as computed."""
    if verifies:
        sequence.num_inflight += 1
        num_tokens = sequence.num_computed_tokens + 1
        return LaunchedRow(sequence, num_tokens, True, sequence.draft_token_ids)
    cache.advance(sequence)
    samples = sequence.num_computed_tokens == sequence.num_tokens
    sequence.num_inflight += samples
    return LaunchedRow(sequence, sequence.num_computed_tokens, samples, None)


def _step_failed(cause: Exception) -> StepFailed:
    error = StepFailed(f"the step failed with {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _owner_mismatch(sequence: Sequence) -> StateOwnerMismatch:
    return StateOwnerMismatch(
        f"sequence {sequence.uid} found another sequence's state in its slot; it was ended so that "
        "no text leaks, retry the request"
    )


def _nothing_to_sample(sequence: Sequence) -> NothingToSample:
    return NothingToSample(
        f"no token is left to sample at position {len(sequence.token_ids)}: structured output, "
        "logit_bias, min_tokens and logits processors exclude all together; drop one of them"
    )


def _non_finite(sequence: Sequence) -> NonFiniteLogits:
    return NonFiniteLogits(
        f"the logits at position {len(sequence.token_ids)} of sequence {sequence.uid} are NaN or "
        "Inf; check the weights and dtype, or retry the request"
    )
