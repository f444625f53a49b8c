"""One sequence's failure is its own; a failed step costs its rows; nobody waits for ever."""

from typing import Any

import numpy as np
import pytest

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.errors import (
    EngineDead,
    HybridJaxError,
    IntegrityError,
    NonFiniteLogits,
    NothingToSample,
    StateOwnerMismatch,
    StepFailed,
)
from tests.helpers.engine_checks import (
    Record,
    assert_baseline,
    drive,
    expected_tokens,
    greedy,
    prompt_of,
    small_config,
)
from tests.helpers.fake_runner import FULL, STATE, FakeRunner, window

SPECS = (FULL, window(6), STATE)


def requests(count: int = 4) -> list[Request]:
    return [Request(f"r{i}", prompt_of(3 + 4 * i, i), greedy(12)) for i in range(count)]


def make(run_ahead: bool = True, **options: Any) -> tuple[Engine, FakeRunner, list[Request]]:
    runner = FakeRunner(SPECS, (40, 30, 5), small_config(max_num_seqs=4, run_ahead=run_ahead))
    engine = Engine(runner, options.get("tokenizer"))
    accepted = requests()
    for request in accepted:
        engine.add_request(request)
    return engine, runner, accepted


def check(record: Record, accepted: list[Request], failed: dict[str, type[Exception]]) -> None:
    """Those in `failed` ended with that error, all others with the oracle's tokens."""
    for request in accepted:
        key, final = (request.request_id, 0), record.finals[request.request_id]
        expected = expected_tokens(request, SPECS)
        if request.request_id in failed:
            assert final.finish_reason == "error"
            assert isinstance(final.error, failed[request.request_id])
            assert isinstance(final.error, HybridJaxError)
            assert record.tokens[key] == expected[: len(record.tokens[key])]
        else:
            assert final.finish_reason == "length" and record.tokens[key] == expected


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("step", [0, 2, 5, 8])
def test_nan_logits_end_one_sequence(run_ahead: bool, step: int) -> None:
    engine, runner, accepted = make(run_ahead)
    record = drive(
        engine, before_step=lambda now: runner.poisoned_uids.add(2) if now == step else None
    )
    check(record, accepted, {"r1": NonFiniteLogits})
    assert_baseline(engine, runner)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_a_slot_with_another_owner_ends_one_sequence(run_ahead: bool) -> None:
    engine, runner, accepted = make(run_ahead)

    def steal(now: int) -> None:
        if now == 6:
            runner.owners[2][runner.owners[2] == 3] = 999

    record = drive(engine, before_step=steal)
    check(record, accepted, {"r2": StateOwnerMismatch})
    assert_baseline(engine, runner)


def test_a_mismatch_in_an_unfinished_chunk_is_noticed() -> None:
    runner = FakeRunner(SPECS, (40, 30, 5), small_config(max_num_seqs=4))
    engine = Engine(runner, None)
    engine.add_request(Request("a", prompt_of(60), greedy(2)))

    def steal(now: int) -> None:
        if now == 2:
            np.asarray(runner.pending and runner._read(runner.pending[-1], "tokens"))
            runner.owners[2][:] = 999

    record = drive(engine, before_step=steal)
    assert isinstance(record.finals["a"].error, StateOwnerMismatch)
    assert_baseline(engine, runner)


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("where", ["launch_error", "read_error"])
@pytest.mark.parametrize("step", [0, 1, 4, 9])
def test_a_step_that_raises_fails_its_rows_and_the_engine_goes_on(
    run_ahead: bool, where: str, step: int
) -> None:
    engine, runner, accepted = make(run_ahead)

    def fail(now: int) -> None:
        if now == step:
            setattr(runner, where, MemoryError("out of memory on the device"))

    record = drive(engine, before_step=fail)
    failed = [r for r, final in record.finals.items() if final.finish_reason == "error"]
    assert failed
    check(record, accepted, dict.fromkeys(failed, StepFailed))
    assert "out of memory on the device" in str(record.finals[failed[0]].error)
    again = Request("again", prompt_of(9), greedy(9))
    engine.add_request(again)
    check(drive(engine), [again], {})
    assert_baseline(engine, runner)


def test_who_was_not_in_the_failed_step_is_served_as_if_nothing_had_happened() -> None:
    runner = FakeRunner(SPECS, (40, 30, 2), small_config(max_num_seqs=1))
    engine = Engine(runner, None)
    accepted = requests(3)
    for request in accepted:
        engine.add_request(request)
    record = drive(
        engine,
        before_step=lambda now: (
            setattr(runner, "launch_error", ValueError("x")) if now == 2 else None
        ),
    )
    check(record, accepted, {"r0": StepFailed})
    assert_baseline(engine, runner)


@pytest.mark.parametrize("where", ["launch_error", "read_error"])
def test_an_engine_that_cannot_recover_ends_everything_and_says_why(where: str) -> None:
    engine, runner, accepted = make()

    def fail(now: int) -> None:
        if now == 3:
            setattr(runner, where, RuntimeError("device lost"))
            runner.reset_error = RuntimeError("still lost")
            engine.add_request(Request("queued", prompt_of(3), greedy(2)))

    record = drive(engine, before_step=fail)
    assert {f.finish_reason for f in record.finals.values()} <= {"error", "length"}
    assert "queued" in record.finals and len(record.finals) == len(accepted) + 1
    with pytest.raises(EngineDead, match="still lost"):
        engine.add_request(Request("late", prompt_of(3), greedy(2)))
    assert not engine.has_work() and engine.step() == []
    assert_baseline(engine, runner)


def test_a_corrupt_table_is_caught_on_the_host_before_the_step() -> None:
    engine, runner, _ = make()
    for _ in range(4):
        engine.step()
    engine._cache.page_groups[0].table[:] = 1
    with pytest.raises(IntegrityError, match="page table of group 0"):
        engine.check_integrity()
    events = [event for _ in range(2) for event in engine.step()]
    errors = [str(event.error) for event in events if event.error]
    assert errors and all("used by two batch rows" in text for text in errors)
    drive(engine)
    assert_baseline(engine, runner)


class BrokenTokenizer:
    """Cannot decode the token 50."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        if 50 in token_ids[-1:]:
            raise KeyError(50)
        return "x" * len(token_ids)


class HoldsBack:
    """Never has a whole character; raises while it is broken."""

    is_broken = False

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        if self.is_broken:
            raise KeyError(token_ids[-1])
        return "\ufffd"


def test_a_tokenizer_that_raises_harms_one_request() -> None:
    engine, runner, accepted = make(tokenizer=BrokenTokenizer())
    broken = [r for r in accepted if 50 in expected_tokens(r, SPECS)]
    clean = [r for r in accepted if r not in broken and 50 not in r.prompt_token_ids]
    assert broken and clean
    record = drive(engine)
    for request in broken:
        assert isinstance(record.finals[request.request_id].error, KeyError)
    check(record, clean, {})
    assert_baseline(engine, runner)


@pytest.mark.parametrize("aborted", [True, False])
def test_a_prompt_or_an_end_that_cannot_be_decoded_harms_one_request(aborted: bool) -> None:
    """A tokenizer that raises at a prompt's last token, or at what an aborted request held back."""
    broken = Request("broken", (*prompt_of(4), 50), greedy(12))
    runner = FakeRunner(SPECS, (40, 30, 5), small_config(max_num_seqs=4))
    tokenizer = HoldsBack() if aborted else BrokenTokenizer()
    engine = Engine(runner, tokenizer)
    clean = [r for r in requests() if 50 not in (*expected_tokens(r, SPECS), *r.prompt_token_ids)]
    for request in (broken, *clean):
        engine.add_request(request)
    record = Record()
    for _ in range(4):
        record.add(engine.step())
    if aborted:
        engine.abort("broken")
        tokenizer.is_broken = True
        engine.drain_inbox()
        tokenizer.is_broken = False
        record.add(engine.step())
        assert record.finals["broken"].finish_reason == "abort"
    else:
        assert isinstance(record.finals["broken"].error, KeyError)
    assert clean
    check(drive(engine, record=record), clean, {})
    assert_baseline(engine, runner)


def test_the_fake_runner_notices_a_wrong_table() -> None:
    runner = FakeRunner((FULL,), (40,), small_config())
    engine = Engine(runner, None)
    engine.add_request(Request("a", prompt_of(9), greedy(4)))
    engine.step()
    engine._cache.page_groups[0].table[1, :2] = engine._cache.page_groups[0].table[1, 1::-1]
    drive_quietly(engine)
    assert any("unwritten place" in text for text in runner.violations)


def drive_quietly(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


@pytest.mark.parametrize("run_ahead", [True, False])
def test_no_completion_goes_on_from_a_stolen_state(run_ahead: bool) -> None:
    specs = (FULL, STATE)
    config = small_config(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        prefill_alignment=4,
        checkpoint_interval=8,
        run_ahead=run_ahead,
    )
    runner = FakeRunner(specs, (60, 20), config)
    engine = Engine(runner, None)
    request = Request("r0", prompt_of(13, 3), greedy(12, n=3))
    engine.add_request(request)
    stolen: list[int] = []

    def steal(_: int) -> None:
        for sequence in engine._scheduler.running.values():
            if sequence.index == 0 and sequence.num_computed_tokens == 8 and not stolen:
                pair = sequence.slots[1]
                assert pair is not None
                stolen.append(pair.read)  # after the steps that are under way
                runner.pending.append(lambda: runner.owners[1].__setitem__(stolen[0], 999))

    record = drive(engine, before_step=steal)
    assert stolen and isinstance(record.ends[("r0", 0)].error, StateOwnerMismatch)
    for index in (1, 2):  # either they share what was stolen, or the first one ended before
        if run_ahead:
            assert isinstance(record.ends[("r0", index)].error, StateOwnerMismatch)
        else:
            assert record.tokens[("r0", index)] == expected_tokens(request, specs)
    assert_baseline(engine, runner)
    again = Request("r1", request.prompt_token_ids, greedy(4))
    engine.add_request(again)
    assert drive(engine).tokens[("r1", 0)] == expected_tokens(again, specs)


def test_a_request_that_leaves_nothing_to_sample_costs_nobody_a_cached_prefix() -> None:
    specs = (FULL, STATE)
    config = small_config(max_num_seqs=4, prefill_alignment=4, checkpoint_interval=8)
    runner = FakeRunner(specs, (60, 20), config)
    engine = Engine(runner, None)
    runner.unusable_uids.add(2)
    for name, failed in (("r0", False), ("r1", True), ("r2", False)):
        request = Request(name, prompt_of(13, 3), greedy(4))
        engine.add_request(request)
        record = drive(engine)
        error = record.finals[name].error
        assert isinstance(error, NothingToSample) if failed else error is None
        assert record.tokens[(name, 0)] == ([] if failed else expected_tokens(request, specs))
    assert record.finals["r2"].cache.cached_tokens == 12
    assert_baseline(engine, runner)
