"""The batching loop: schedule, build, launch the next step, then finish the previous one."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from hybrid_jax.cache.prefix import Prefix
from hybrid_jax.engine.accounting import take_snapshot, take_stats
from hybrid_jax.engine.batch_builder import BatchBuilder
from hybrid_jax.engine.cache_manager import CacheManager
from hybrid_jax.engine.in_flight import InFlight, prompt_spans
from hybrid_jax.engine.integrity import check_integrity
from hybrid_jax.engine.kept import KeptPrefixes
from hybrid_jax.engine.outputs import OutputProcessor
from hybrid_jax.engine.scheduler import Scheduler
from hybrid_jax.engine.step_clock import StepClock
from hybrid_jax.engine.step_memory import StepMemory
from hybrid_jax.engine.types import (
    MAX_UID,
    EngineStats,
    ReleaseReason,
    Request,
    Sequence,
    SequenceState,
    StepRunner,
    TokenEvent,
    Tokenizer,
    TokenLogprob,
)
from hybrid_jax.engine.validation import RequestValidator
from hybrid_jax.errors import (
    CachesFull,
    EngineDead,
    InvalidRequest,
    NonFiniteLogits,
    NothingToSample,
    QueueFull,
    StateOwnerMismatch,
    StepFailed,
)
from hybrid_jax.memory.snapshot import MemorySnapshot
from hybrid_jax.sampling_params import SamplingParams
from hybrid_jax.structured import GrammarCompiler, TokenMatcher

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Arrival:
    """A new request, in the inbox."""

    sequences: list[Sequence]


@dataclass(frozen=True)
class _Abort:
    """An abort, in the inbox. Names sequences, not an id: the id may be in use again by then."""

    sequences: list[Sequence]


class Engine:
    """Runs many requests on one runner. Host only; reads device arrays when a step is finished.

    `add_request`, `abort` and `stats` may be called from any thread; everything else from one.
    `config` and `model_config` are the runner's; `dead` says why nothing is accepted any more, and
    `kept` has the prefixes that outlive requests.
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
            self._cache, max_num_batched_tokens=config.max_num_batched_tokens
        )
        self.kept = KeptPrefixes(runner, self._cache)
        self._memory = StepMemory(runner, self._cache, config, stop_ids)
        self._builder = BatchBuilder(self._cache, config, model.vocab_size)
        self._outputs = OutputProcessor(tokenizer, stop_ids)
        self._validator = RequestValidator(runner, self._cache, tokenizer is not None, grammars)
        self._lock = threading.RLock()  # guards _requests, _inbox and _num_arrivals
        self._requests: dict[str, list[Sequence]] = {}  # not ended yet
        self._inbox: deque[_Arrival | _Abort] = deque()
        self._num_arrivals = 0
        self._in_flight: InFlight | None = None
        self._events: list[TokenEvent] = []
        self._num_steps = 0
        self._clock = StepClock()
        self.dead: EngineDead | None = None
        runner.prepare(self._builder.padding_batches())

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
        max_tokens = self._validator.check(request)
        with self._lock:
            if self.dead is not None:
                raise self.dead
            if request.request_id in self._requests:
                raise InvalidRequest(
                    f"request id {request.request_id!r} is in use; choose another or wait"
                )
            _check_queue(self._num_waiting(), self.config.max_queue)
            sequences = _make_sequences(
                request,
                max_tokens=max_tokens,
                first_arrival=self._num_arrivals + 1,
                engine_seed=self.config.seed,
                make_matcher=self._validator.matcher,
            )
            self._num_arrivals += len(sequences)
            self._requests[request.request_id] = sequences
            self._inbox.append(_Arrival(sequences))

    def abort(self, request_id: str) -> bool:
        """Ends a request at the next `step` or `drain_inbox`; False if it is unknown or ended."""
        with self._lock:
            sequences = self._requests.get(request_id)
            if sequences is None:
                return False
            self._inbox.append(_Abort(sequences))
            return True

    def has_work(self) -> bool:
        """Whether `step` has something to do or events to give."""
        return bool(self._requests or self._events)

    def step(self) -> list[TokenEvent]:
        """Launches the next step, finishes the previous one and returns what is new.

        An interrupt loses nothing but time: all running sequences are computed again.
        """
        self._clock.start()
        try:
            self.drain_inbox()
            if self._in_flight is not None and self._in_flight.constrains:
                step, self._in_flight = self._in_flight, None
                self._finish(step)
            step = self._launch()
            self._clock.lap("launch")
            if self.config.run_ahead:
                step, self._in_flight = self._in_flight, step
            if step is not None:
                self._finish(step)
        except BaseException:
            self._recover()
            raise
        if not self._requests:
            self._in_flight = None  # holds tokens of ended sequences only
        if self.config.debug_poison:
            self.check_integrity()
        events, self._events = self._events, []
        return events

    def drain_inbox(self) -> None:
        """Queues new requests and ends aborted ones, without running a step."""
        while self._inbox:
            item = self._inbox[0]  # taken out last: an interrupt must not lose it
            if isinstance(item, _Arrival):
                self._outputs.open(item.sequences[0].request)
                for sequence in item.sequences:
                    self._scheduler.add(sequence)
            else:
                for sequence in item.sequences:
                    if sequence.state is not SequenceState.FINISHED:
                        event = self._outputs.abort(sequence)
                        self._end(sequence, ReleaseReason.ABORT, event)
            self._inbox.popleft()

    def hold(self, request_id: str) -> Prefix:
        """Keeps what a running request of one completion has computed, to fork or snapshot it.

        Raises InvalidRequest if nothing of it is computed, or it ended.
        """
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._finish(step)  # so that all computed tokens are known
        for sequence in self._requests.get(request_id, ()):
            if sequence.row:
                return self.kept.keep(sequence)
        raise InvalidRequest(f"request {request_id!r} is not running; hold it before it ends")

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        return take_stats(
            self._cache,
            self._scheduler,
            waiting=self._num_waiting(),
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
        with self._lock:
            self.dead = self.dead or EngineDead("the engine is closed; make a new one")
            self._inbox.extend(_Abort(sequences) for sequences in self._requests.values())
        self.drain_inbox()
        self._in_flight = None

    def _launch(self) -> InFlight | None:
        plan = self._scheduler.schedule()
        self._memory.swap_out(plan.preempted)
        if not plan.num_tokens:
            if self._in_flight is None:
                self._fail_stuck()
            return None
        try:
            self._memory.prepare(plan.admitted)
            output = self._runner.step(self._builder.build(plan), self._sampling.device())
        except Exception as error:
            self._fail_step(plan.sequences, error)
            return None
        self._num_steps += 1
        spans = prompt_spans(plan)
        return InFlight([_advance(self._cache, s) for s in plan.sequences], spans, output)

    def _finish(self, step: InFlight) -> None:
        try:
            results = step.read()
        except Exception as error:
            self._fail_step([sequence for sequence, *_ in step.rows], error)
            return
        self._clock.lap("wait")
        for (sequence, num_tokens, samples), result in zip(step.rows, results, strict=True):
            if sequence.state is SequenceState.FINISHED:
                continue  # ended while this step was in flight: its token is dropped
            sequence.num_inflight -= samples
            if not result.owner_ok:
                self._quarantine(sequence, _owner_mismatch(sequence))
            elif samples and not result.finite:
                self._quarantine(sequence, _non_finite(sequence))
            else:
                self._cache.commit(sequence, num_tokens, good=result.finite)
                if samples and result.usable:
                    self._append(sequence, result.token, result.logprob)
                elif samples:  # its memory is good, so it is released like any other
                    event = self._outputs.fail(sequence, _nothing_to_sample(sequence))
                    self._end(sequence, ReleaseReason.FINISH, event)
        self._clock.lap("output")

    def _append(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        try:
            if not 0 <= token_id < (size := self.model_config.vocab_size):
                raise StepFailed(f"token {token_id} was sampled from {size} tokens")
            event = self._outputs.append(sequence, token_id, logprob)
        except Exception as error:  # for example a tokenizer's: nobody else is to suffer
            logger.exception("request %s failed", sequence.request.request_id)
            self._fail(sequence, error)
            return
        if event.finish_reason is None:
            self._events.append(event)
        else:
            self._end(sequence, ReleaseReason.FINISH, event)

    def _end(self, sequence: Sequence, reason: ReleaseReason, event: TokenEvent) -> None:
        event = self.kept.end(sequence, event)
        self._scheduler.remove(sequence, reason)
        if event.final:
            with self._lock:
                del self._requests[sequence.request.request_id]
        self._events.append(event)

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

    def _recover(self) -> None:
        """Starts all live sequences again on fresh caches; what was lost comes out the same."""
        self._in_flight = None
        with self._lock:
            self.drain_inbox()
            for request_id in [r for r in self._requests if not self._outputs.is_open(r)]:
                del self._requests[request_id]  # its final event is out
            live = [s for sequences in self._requests.values() for s in sequences]
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
        with self._lock:
            self.dead = EngineDead(f"the engine died, {reason}; make a new one")
            self.drain_inbox()  # nothing enters after this
        for sequence in list(self._scheduler.waiting.values()):
            self._fail(sequence, self.dead)

    def _num_waiting(self) -> int:
        queued = sum(len(i.sequences) for i in list(self._inbox) if isinstance(i, _Arrival))
        return queued + len(self._scheduler.waiting)


def _check_queue(waiting: int, limit: int) -> None:
    if limit and waiting >= limit:
        raise QueueFull(f"{waiting} sequences wait and max_queue is {limit}; retry later")


def _advance(cache: CacheManager, sequence: Sequence) -> tuple[Sequence, int, bool]:
    """Counts a sequence's scheduled tokens as computed; its row of the step in flight."""
    cache.advance(sequence)
    samples = sequence.num_computed_tokens == sequence.num_tokens
    sequence.num_inflight += samples
    return sequence, sequence.num_computed_tokens, samples


def _make_sequences(
    request: Request,
    *,
    max_tokens: int,
    first_arrival: int,
    engine_seed: int,
    make_matcher: Callable[[SamplingParams], TokenMatcher | None],
) -> list[Sequence]:
    """One waiting sequence per completion, with consecutive seeds."""
    seed = _seed(request.params, engine_seed, first_arrival)
    # One list for all completions; the first token has nothing before it that predicts it.
    asks = request.params.prompt_logprobs is not None
    prompt_logprobs: list[TokenLogprob | None] | None = [None] if asks else None
    return [
        Sequence(
            request=request,
            index=index,
            arrival=first_arrival + index,
            uid=(first_arrival + index - 1) % MAX_UID + 1,
            seed=(seed + index) % 2**32,
            max_tokens=max_tokens,
            token_ids=list(request.prompt_token_ids),
            matcher=make_matcher(request.params),
            prompt_logprobs=prompt_logprobs,
        )
        for index in range(request.params.num_sequences)
    ]


def _seed(params: SamplingParams, engine_seed: int, arrival: int) -> int:
    """The request's own seed, or one that is spread by the engine's seed and the arrival."""
    if params.seed is not None:
        return int(params.seed)
    mixed = (engine_seed * 0x9E3779B97F4A7C15 + arrival * 0xBF58476D1CE4E5B9) % 2**64
    return (mixed ^ (mixed >> 29)) * 0x94D049BB133111EB % 2**64 >> 32


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
