"""Who runs when: order, budget, phase, preemption and progress."""

import pytest

from hybrid_jax.engine.cache_manager import CacheManager
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.integrity import check_integrity
from hybrid_jax.engine.scheduler import Schedule, Scheduler
from hybrid_jax.engine.types import ReleaseReason, Request, Sequence, SequenceState
from hybrid_jax.runtime.batch import StepBatch, StepKind, StepOutput
from tests.helpers.engine_checks import (
    assert_baseline,
    drive,
    expected_tokens,
    greedy,
    prompt_of,
    small_config,
)
from tests.helpers.fake_runner import FULL, STATE, FakeRunner, window


class HostOnly:
    """A scheduler and its cache manager without an engine: steps are only counted.

    Without a prefix cache, whose checkpoints end chunks as well.
    """

    def __init__(self, pages: int, **options: object) -> None:
        config = small_config(max_num_seqs=8, prefix_cache=False, **options)
        runner = FakeRunner((FULL, STATE), (pages + 1, 9), config)
        self.cache = CacheManager(runner.groups, runner.sizes, runner.config)
        self.scheduler = Scheduler(
            self.cache, max_num_batched_tokens=runner.config.max_num_batched_tokens
        )

    def add(self, arrival: int, length: int, max_tokens: int = 30) -> Sequence:
        request = Request(f"r{arrival}", prompt_of(length, arrival), greedy(max_tokens))
        sequence = Sequence(
            request, 0, arrival, arrival, 0, max_tokens, list(request.prompt_token_ids)
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Schedule:
        """Schedules, computes and appends a token where one is due."""
        plan = self.scheduler.schedule()
        for sequence in plan.sequences:
            assert sequence.row and sequence.num_scheduled_tokens
            self.cache.advance(sequence)
            if sequence.num_computed_tokens == sequence.num_tokens:
                sequence.token_ids.append(7)
        check_integrity(self.cache, self.scheduler.running.values())
        return plan


def chunks(plan: Schedule) -> dict[int, int]:
    """Prefill rows of a step that has already been counted, by arrival."""
    return {arrival: s.num_computed_tokens for arrival, s in plan.prefill.items()}


def test_prefills_come_in_order_of_arrival_within_the_budget() -> None:
    host = HostOnly(40)
    for arrival, length in ((1, 20), (2, 9), (3, 9)):
        host.add(arrival, length)
    assert chunks(host.step()) == {1: 16}
    assert chunks(host.step()) == {1: 20, 2: 9, 3: 3}
    plan = host.step()
    assert list(plan.decode) == [1, 2] and chunks(plan) == {3: 9}


def test_a_prompt_of_one_token_is_a_prefill_row() -> None:
    host = HostOnly(40)
    host.add(1, 1)
    assert list(host.step().prefill) == [1]
    assert list(host.step().decode) == [1]


def test_a_chunk_of_one_token_is_a_prefill_row() -> None:
    host = HostOnly(40)
    host.scheduler.chunk_limit = lambda sequence, remaining: 1
    host.add(1, 3)
    assert [list(host.step().prefill) for _ in range(3)] == [[1]] * 3
    assert list(host.step().decode) == [1]


@pytest.mark.parametrize("limit", [-3, 0])
def test_a_chunk_limit_below_one_still_progresses(limit: int) -> None:
    host = HostOnly(40)
    host.scheduler.chunk_limit = lambda sequence, remaining: limit
    sequence = host.add(1, 3)
    host.step()
    assert sequence.num_computed_tokens == 1


def test_the_youngest_is_preempted_and_returns_to_the_head_of_the_queue() -> None:
    host = HostOnly(7)
    for arrival in (1, 2, 3):
        host.add(arrival, 4, max_tokens=20)
    host.step()
    waiting = host.add(4, 4)
    plan = host.step()
    while not plan.preempted:
        assert not waiting.row
        plan = host.step()
    assert [s.arrival for s in plan.preempted] == [3]
    assert list(host.scheduler.waiting) == [3, 4]
    assert not plan.admitted


def test_a_preempted_sequence_prefills_what_it_had_generated() -> None:
    host = HostOnly(7)
    old, young = host.add(1, 4, max_tokens=20), host.add(2, 4, max_tokens=20)
    while young.state is not SequenceState.WAITING or not young.num_preemptions:
        host.step()
    known = len(young.token_ids)
    assert known > young.num_prompt_tokens
    assert (young.num_computed_tokens, young.row, young.num_pages) == (0, 0, 0)
    while not old.is_exhausted:
        host.step()
    host.scheduler.remove(old, ReleaseReason.FINISH)
    host.scheduler.chunk_limit = lambda sequence, remaining: 3
    decoding = False
    while not decoding:
        plan = host.step()
        decoding = bool(plan.decode)
        assert decoding == (young.num_computed_tokens > known)


def test_an_older_prefill_takes_the_pages_of_a_row_already_scheduled() -> None:
    host = HostOnly(8)
    host.scheduler.chunk_limit = lambda sequence, remaining: 4
    old = host.add(1, 16, max_tokens=4)
    host.step()
    young = host.add(2, 4, max_tokens=20)
    # Admission leaves the old prompt its pages; here the young one got in all the same.
    host.cache.prefixes.find(young)
    host.cache.attach(young)
    assert host.cache.allocate(young, 28)
    host.scheduler.running[2] = host.scheduler.waiting.pop(2)
    young.state = SequenceState.RUNNING
    young.num_prefill_tokens, young.num_computed_tokens = 4, 20
    young.token_ids = list(prompt_of(21))
    plan = host.step()
    assert [s.arrival for s in plan.preempted] == [2]
    assert not plan.decode and list(plan.prefill) == [1]
    assert plan.num_tokens == 4
    assert old.row and not young.row


def test_the_youngest_waits_in_place_when_nobody_is_younger() -> None:
    host = HostOnly(5)
    old, young = host.add(1, 8, max_tokens=12), host.add(2, 8, max_tokens=12)
    host.step()
    stalled = [host.step() for _ in range(2)][-1]
    while not stalled.stalled and not stalled.preempted:
        stalled = host.step()
    assert old.row and old.arrival in stalled.decode
    assert not stalled.admitted
    assert young.num_preemptions + stalled.stalled >= 1


def test_nothing_is_admitted_into_pages_that_a_running_prefill_needs() -> None:
    host = HostOnly(6)
    host.add(1, 20, max_tokens=2)
    small = host.add(2, 4, max_tokens=2)
    host.scheduler.chunk_limit = lambda sequence, remaining: 4
    host.step()
    assert not small.row  # one page is left once the first is done, and it may grow into it


class Recording(FakeRunner):
    """Keeps every batch."""

    batches: list[StepBatch]

    def step(self, batch: StepBatch, sampling: object) -> StepOutput:
        self.__dict__.setdefault("batches", []).append(batch)
        return super().step(batch, sampling)


def engine_on(runner: FakeRunner, *requests: Request) -> Engine:
    engine = Engine(runner, None)
    for request in requests:
        engine.add_request(request)
    return engine


@pytest.mark.parametrize("run_ahead", [True, False])
def test_a_step_is_launched_before_the_previous_one_is_read(run_ahead: bool) -> None:
    runner = Recording((FULL,), (30,), small_config(run_ahead=run_ahead))
    engine = engine_on(runner, Request("a", prompt_of(5), greedy(4)))
    assert engine.step() == [] if run_ahead else engine.step()
    drive(engine)
    decode = [b for b in runner.batches if b.kind is StepKind.DECODE]
    assert [int(b.token_ids[0]) == -1 for b in decode] == [run_ahead] * 3
    assert_baseline(engine, runner)


def test_no_step_is_launched_for_tokens_beyond_max_tokens() -> None:
    runner = Recording((FULL,), (30,), small_config())
    drive(engine_on(runner, Request("a", prompt_of(5), greedy(4))))
    assert len(runner.batches) == 4


def test_decode_steps_use_row_buckets_and_mixed_steps_token_buckets() -> None:
    config = small_config(max_num_seqs=5, row_buckets=(2, 5), token_buckets=(8, 16))
    runner = Recording((FULL, STATE), (60, 6), config)
    requests = [Request(f"r{i}", prompt_of(3, i), greedy(6)) for i in range(3)]
    drive(engine_on(runner, *requests))
    shapes = [(b.kind, len(b.token_ids), len(b.seq_lens)) for b in runner.batches]
    assert shapes[0] == (StepKind.MIXED, 16, 5)
    assert set(shapes[1:]) == {(StepKind.DECODE, 5, 5)}


@pytest.mark.parametrize("seqs", [1, 2, 3, 5, 17])
def test_warm_up_covers_every_bucket(seqs: int) -> None:
    config = small_config(max_num_seqs=seqs, warmup=True)
    runner = FakeRunner((FULL, window(5), STATE), (99, 99, seqs + 1), config)
    engine = Engine(runner, None)
    compiled = runner.num_compiles
    for i in range(2 * seqs + 1):
        engine.add_request(Request(f"r{i}", prompt_of(1 + 5 * i % 40, i), greedy(3 + i % 7)))
    drive(engine)
    assert runner.num_compiles == compiled > 0
    assert_baseline(engine, runner)


@pytest.mark.parametrize("specs", [(FULL,), (FULL, STATE), (window(6), FULL)])
def test_two_requests_of_sixty_percent_finish_with_bounded_recompute(specs: tuple) -> None:
    counts = tuple(9 if spec is STATE else 11 for spec in specs)
    runner = FakeRunner(specs, counts, small_config())
    requests = [Request(f"r{i}", prompt_of(4, i), greedy(20)) for i in range(2)]
    engine = engine_on(runner, *requests)
    record = drive(engine)
    for request in requests:
        assert record.tokens[(request.request_id, 0)] == expected_tokens(request, specs)
    assert 1 <= engine.stats().preemptions <= 2
    assert engine.stats().steps < 60
    assert_baseline(engine, runner)


def test_window_pages_go_back_while_the_sequence_runs() -> None:
    runner = FakeRunner((window(6),), (30,), small_config())
    engine = engine_on(runner, Request("a", prompt_of(20), greedy(40)))
    peaks = []

    def look(step: int) -> None:
        if step > 4:
            peaks.append(engine.stats().caches[0].used)

    drive(engine, before_step=look)
    assert max(peaks) <= 3  # six tokens reach into three pages of four at most
    assert_baseline(engine, runner)
