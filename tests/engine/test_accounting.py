"""What an engine says it holds, against the sequences that hold it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_jax.cache.chips import find_chip
from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.accounting import group_stats
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.errors import ModelError
from hybrid_jax.llm import LLM
from hybrid_jax.memory.plan import plan_memory
from hybrid_jax.memory.snapshot import MemorySnapshot, compare
from tests.helpers import tiny
from tests.helpers.engine_checks import drive, greedy, prompt_of, small_config
from tests.helpers.fake_runner import FULL, STATE, FakeRunner, window

PAGE, WINDOW, PAGES = 4, 6, 40


def make() -> Engine:
    config = small_config(max_num_seqs=4, page_size=PAGE, run_ahead=False, prefix_cache=False)
    return Engine(FakeRunner((FULL, window(WINDOW), STATE), (PAGES, 30, 5), config), None)


def test_units_and_bytes_follow_the_sequences() -> None:
    """Two sequences, after every step until they end: tails are counted token by token."""
    engine = make()
    lengths = (3, 14)
    for i, length in enumerate(lengths):
        engine.add_request(Request(f"r{i}", prompt_of(length), greedy(9)))
    peak = 0
    while engine.has_work():
        engine.step()
        full, win, state = engine.memory().pools
        computed = [s.num_computed_tokens for s in engine._scheduler.running.values()]
        assert state.used == len(computed) and state.fragmentation == 0.0
        pages = [-(-count // PAGE) for count in computed]
        assert full.used == sum(pages)
        peak = max(peak, full.used)
        live = [min(count, WINDOW - 1) for count in computed]
        for pool, tokens in ((full, sum(computed)), (win, sum(live))):
            if pool.used:
                assert pool.fragmentation == pytest.approx(1 - tokens / (pool.used * PAGE))
        for pool in (full, win, state):
            assert pool.used + pool.cached + pool.free == pool.total
            assert 0 <= pool.fragmentation < 1
        assert full.total == PAGES - 1
        assert full.unit_bytes == PAGE * FULL.bytes_per_token
    after = engine.memory()
    assert [pool.used for pool in after.pools] == [0, 0, 0]
    # The last pages are taken and given back within one step.
    assert peak <= after.pools[0].peak <= peak + len(lengths)
    assert after.pools[0].fragmentation == 0.0


def test_a_sequence_may_end_while_it_is_counted() -> None:
    """Statistics are for any thread: a sequence that just ended still has a row, but no pages."""
    engine = make()
    engine.add_request(Request("a", prompt_of(9), greedy(5)))
    engine.step()
    (sequence,) = engine._scheduler.running.values()
    sequence.pages = ()
    assert [group.fragmentation for group in group_stats(engine._cache, [sequence])] == [0.0] * 4


def test_a_snapshot_survives_json() -> None:
    engine = make()
    engine.add_request(Request("r", prompt_of(9), greedy(5)))
    engine.step()
    snapshot = engine.memory()
    body = json.loads(snapshot.to_json())
    assert MemorySnapshot.from_json(snapshot.to_json()) == snapshot
    full, page = body["pools"][0], PAGE * FULL.bytes_per_token
    (sequence,) = engine._scheduler.running.values()
    assert full["used"] == -(-sequence.num_computed_tokens // PAGE) > 0
    assert full["used_bytes"] == full["used"] * page
    assert full["free_bytes"] == (PAGES - 1 - full["used"]) * page
    drive(engine)
    for text in ("", "[]", "{}", json.dumps(body | {"version": 9}), json.dumps({"version": 1})):
        with pytest.raises(ModelError, match="snapshot"):
            MemorySnapshot.from_json(text)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "lara_mini"])
def test_a_plan_from_the_snapshots_flags_is_what_is_live(name: str, tmp_path: Path) -> None:
    directory = tiny.write_checkpoint(name, tmp_path, seed=0, dtype="bfloat16")
    # A budget below what the flags ask for: pages are clamped, and planned as they are.
    with LLM(directory, max_num_seqs=3, cache_bytes=2**19) as llm:
        snapshot = llm.memory()
        assert llm.stats().running == 0
        model = llm._engine._runner.model_config
    # Elsewhere there may be more room, so that nothing is clamped.
    config = EngineConfig(**snapshot.config | {"cache_bytes": 0})
    plan = plan_memory(
        model, config, snapshot.dtype, chip=find_chip("cpu"), temporaries_from="estimate"
    )
    lines = compare(plan, snapshot)
    assert [line.name for line in lines][-1] == "step temporaries"
    for line in lines[:-1]:
        assert line.planned == pytest.approx(line.live, rel=0.01, abs=64 * 16), line.name
    other = replace(snapshot, live={"linear": 5})
    assert compare(plan, other)[-1].planned is None
