"""What preempted sequences keep: no policy changes a token, and each computes again what it says.

"All" has full, window and linear layers. Freed memory is wiped after every step.
"""

import random
from typing import Any

import pytest

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import EngineStats, Request
from hybrid_jax.specs import StateSpec
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
from tests.helpers.real_engine import Rig, poison, random_prompt

PAGE, MAX_LEN, PLENTY = 4, 64, 2**20
STACKS = {
    "full": (FULL,),
    "window": (FULL, window(6)),
    "state": (FULL, STATE),
    "all": (window(9), STATE, FULL, window(6)),
    "only windows": (window(20), STATE),
}
FULL_PAGE = FULL.bytes_per_token * PAGE


class Counting(FakeRunner):
    """Counts the tokens that are computed."""

    computed = 0

    def step(self, batch: Any, sampling: Any) -> Any:
        self.computed += int(batch.query_start_loc[-1])
        return super().step(batch, sampling)


def make(stack: str, pages: int, **options: Any) -> tuple[Engine, Counting]:
    """An engine with so many pages per group, and enough slots."""
    specs = STACKS[stack]
    counts = tuple(16 if isinstance(s, StateSpec) else pages + 1 for s in specs)
    config = small_config(prefill_alignment=8, checkpoint_interval=16, debug_poison=True, **options)
    runner = Counting(specs, counts, config)
    return Engine(runner, None), runner


def growing(count: int, seed: int, new: int = 30) -> list[Request]:
    """Requests with different prompts that soon need more pages than there are."""
    rng = random.Random(seed)
    return [
        Request(f"r{i}", prompt_of(rng.randint(2, 14), 7 * seed + i), greedy(rng.randint(9, new)))
        for i in range(count)
    ]


def serve(engine: Engine, requests: list[Request], **options: Any) -> Record:
    for request in requests:
        engine.add_request(request)
    return drive(engine, **options)


def check(record: Record, requests: list[Request], stack: str) -> None:
    for request in requests:
        expected = expected_tokens(request, STACKS[stack])
        assert record.tokens[(request.request_id, 0)] == expected


def needed(requests: list[Request]) -> int:
    """Tokens that are computed if nothing is computed twice; the last of each is never fed."""
    return sum(len(r.prompt_token_ids) + r.params.max_tokens - 1 for r in requests)


def tail_bytes(stack: str, pages: int) -> int:
    """Bytes of a sequence of which only so many full pages are saved."""
    reach = {
        spec: -(-spec.window // PAGE) + 1 for spec in STACKS[stack] if spec not in (FULL, STATE)
    }
    total = 0
    for spec in STACKS[stack]:
        total += spec.nbytes if isinstance(spec, StateSpec) else reach.get(spec, pages) * FULL_PAGE
    return total


def run(stack: str, seed: int, **options: Any) -> EngineStats:
    """Random requests in small pools; checks all that holds for every policy."""
    engine, runner = make(stack, pages=12, **options)
    requests = growing(6, seed)
    check(serve(engine, requests), requests, stack)
    assert_baseline(engine, runner)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.recomputed_tokens == runner.computed - needed(requests)
    assert stats.swap.used_bytes == 0
    assert stats.swap.peak_bytes <= options.get("swap_bytes", 0)
    return stats


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("stack", list(STACKS))
def test_with_room_on_the_host_nothing_is_computed_twice(
    stack: str, run_ahead: bool, prefix_cache: bool
) -> None:
    for seed in range(5):
        stats = run(stack, seed, run_ahead=run_ahead, prefix_cache=prefix_cache, swap_bytes=PLENTY)
        assert stats.recomputed_tokens == 0
        assert stats.swap.num_in == stats.swap.num_out == stats.preemptions


@pytest.mark.parametrize("stack", list(STACKS))
def test_without_a_swap_space_tokens_are_computed_again(stack: str) -> None:
    """With a prefix cache fewer, since what nobody needed meanwhile is found again."""
    cached = [run(stack, seed) for seed in range(5)]
    plain = [run(stack, seed, prefix_cache=False) for seed in range(5)]
    assert all(stats.swap.num_out == 0 for stats in cached + plain)
    lost = [sum(stats.recomputed_tokens for stats in some) for some in (cached, plain)]
    assert 0 < lost[0] < lost[1]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("stack", list(STACKS))
def test_a_swap_space_for_one_sequence_at_a_time(stack: str, prefix_cache: bool) -> None:
    """Some are saved, some of these come back, and all others are computed again."""
    space = tail_bytes(stack, 4)
    options = {"swap_bytes": space, "prefix_cache": prefix_cache}
    used = [run(stack, seed, **options).swap for seed in range(5)]
    assert 0 < sum(swap.num_in for swap in used) <= sum(swap.num_out for swap in used)
    assert any(space // 2 < swap.peak_bytes <= space for swap in used)


@pytest.mark.parametrize("space", ["none", "tail", "plenty"])
@pytest.mark.parametrize("stack", ["full", "state", "all"])
def test_two_requests_of_sixty_percent_of_the_pool(stack: str, space: str) -> None:
    """Both finish after one preemption, and nothing is computed twice if the tail is saved.

    Each has 10 of the 20 pages when they run out, and the older one takes 2 more: what the younger
    one keeps besides is in the prefix tree. Without a swap space it loses at most what it had.
    """
    swap_bytes = {"none": 0, "tail": tail_bytes(stack, 4), "plenty": PLENTY}[space]
    engine, runner = make(stack, pages=20, swap_bytes=swap_bytes)
    requests = [Request(f"r{i}", prompt_of(8, i), greedy(40)) for i in range(2)]
    check(serve(engine, requests), requests, stack)
    stats = engine.stats()
    assert stats.preemptions == 1
    assert runner.computed - needed(requests) == stats.recomputed_tokens <= 40
    assert (stats.recomputed_tokens == 0) == (space != "none")
    assert stats.swap.peak_bytes <= swap_bytes
    assert_baseline(engine, runner)


def until_swapped(stack: str, **options: Any) -> tuple[Engine, Counting, Request, Record]:
    """Two requests of which the second is swapped out, its last token still in flight."""
    engine, runner = make(stack, pages=10, swap_bytes=PLENTY, **options)
    old, young = (Request(f"r{i}", prompt_of(6, i), greedy(30)) for i in range(2))
    for request in (old, young):
        engine.add_request(request)
    record = Record()
    while not engine.stats().swap.used_bytes:
        record.add(engine.step())
        engine.check_integrity()
    return engine, runner, young, record


def test_an_abort_gives_back_the_hosts_memory() -> None:
    engine, runner, young, record = until_swapped("all")
    assert engine.abort(young.request_id)
    record.add(engine.step())
    assert record.ends[(young.request_id, 0)].finish_reason == "abort"
    assert engine.stats().swap.used_bytes == 0
    drive(engine, record=record)
    assert record.ends[("r0", 0)].finish_reason == "length"
    assert_baseline(engine, runner)


def test_closing_the_engine_gives_back_the_hosts_memory() -> None:
    engine, runner, _, record = until_swapped("all")
    engine.close()
    record.add(engine.step())
    assert {end.finish_reason for end in record.ends.values()} == {"abort"}
    assert engine.stats().swap.used_bytes == 0
    assert_baseline(engine, runner)


@pytest.mark.parametrize("swap_bytes", [0, PLENTY])
@pytest.mark.parametrize("stack", ["full", "state", "all"])
def test_a_turn_that_ends_while_it_is_preempted_keeps_its_tokens(
    stack: str, swap_bytes: int
) -> None:
    """Its last token arrives when its memory is gone: a void prefix, which the next turn survives.

    The older request needs a fourth page in the step after the younger one's last token.
    """
    engine, runner = make(stack, pages=6, swap_bytes=swap_bytes)
    old = Request("old", prompt_of(8, 0), greedy(16))
    young = Request("young", prompt_of(8, 1), greedy(5), keep=True)
    record = serve(engine, [old, young])
    check(record, [old, young], stack)
    kept = record.finals["young"].kept
    assert engine.stats().preemptions == 1 and kept is not None and not engine.kept.holds(kept)
    tokens = (*young.prompt_token_ids, *record.tokens[("young", 0)])
    again = Request("again", (*tokens, 3), greedy(4), prefix=engine.kept.share(kept), keep=True)
    record = serve(engine, [again])
    check(record, [again], stack)
    kept = record.finals["again"].kept
    assert kept is not None and kept.length == len(tokens) + 4
    engine.kept.drop(kept)
    assert_baseline(engine, runner)


class Broken(Counting):
    """Logits of one sequence are NaN from the step on in which it is preempted."""

    def read(self, group: int, ids: Any) -> Any:
        self.poisoned_uids.add(2)
        return super().read(group, ids)


def test_what_a_bad_step_left_is_not_brought_back() -> None:
    """The step that was under way when the sequence was saved turns out to be bad."""
    specs = STACKS["all"]
    config = small_config(swap_bytes=PLENTY, debug_poison=True)
    runner = Broken(specs, (11, 16, 11, 11), config)
    engine = Engine(runner, None)
    requests = [Request(f"r{i}", prompt_of(6, i), greedy(30)) for i in range(2)]
    record = serve(engine, requests)
    assert record.ends[("r1", 0)].finish_reason == "error"
    assert engine.stats().swap.num_out == 1 and runner.num_units_written == 0
    check(record, requests[:1], "all")
    assert engine.stats().swap.used_bytes == 0
    runner.poisoned_uids.clear()
    later = [Request(f"later{i}", prompt_of(5, i), greedy(9)) for i in range(20)]
    check(serve(engine, later), later, "all")
    assert_baseline(engine, runner)


class Unreadable(Counting):
    """Its memory cannot be copied to the host."""

    def read(self, group: int, ids: Any) -> Any:
        raise RuntimeError("out of host memory")


def test_what_cannot_be_read_is_computed_again() -> None:
    runner = Unreadable(STACKS["state"], (11, 16), small_config(swap_bytes=PLENTY))
    engine = Engine(runner, None)
    requests = [Request(f"r{i}", prompt_of(6, i), greedy(30)) for i in range(2)]
    check(serve(engine, requests), requests, "state")
    assert engine.stats().recomputed_tokens > 0
    assert engine.stats().swap.used_bytes == 0
    assert_baseline(engine, runner)


def test_a_failed_step_forgets_what_was_saved() -> None:
    engine, runner, young, record = until_swapped("state")
    runner.launch_error = RuntimeError("device lost")
    drive(engine, record=record)
    assert engine.stats().swap.used_bytes == 0
    check(record, [young], "state")
    assert_baseline(engine, runner)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig("lara_mini", tmp_path_factory.mktemp("preemption"))


@pytest.mark.parametrize("swap_bytes", [0, 20_000, PLENTY])
def test_no_policy_changes_a_token_of_a_real_model(swap_bytes: int, rig: Rig) -> None:
    """Of a model with full, window and linear layers, with NaN in all free memory."""
    requests = [Request(f"r{i}", random_prompt(3 + 2 * i, 5), greedy(20 - i)) for i in range(5)]
    engine = rig.engine(longest=30, spare=5, swap_bytes=swap_bytes)
    record = serve(engine, requests, before_step=lambda step: poison(engine, rig.runner))
    rig.oracle.check(record, requests)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert (stats.swap.num_in > 0) == (swap_bytes > 0)
    assert (stats.recomputed_tokens == 0) == (swap_bytes == PLENTY)
    rig.assert_clean(engine)
