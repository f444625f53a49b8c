"""What a failed request touched is cleared and not cached; the next ones are right."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.errors import NonFiniteLogits
from hybrid_jax.specs import StateSpec, WindowSpec
from tests.helpers.engine_checks import drive, greedy
from tests.helpers.real_engine import Rig, random_prompt

GetRig = Callable[[str], Rig]
PROMPT = random_prompt(30, 7)
CACHED = 24  # the last multiple of the grid that leaves a token


def small_grid(rig: Rig, **options: Any) -> Engine:
    return rig.engine(prefill_alignment=8, checkpoint_interval=8, **options)


def ask(engine: Engine, name: str, prompt: tuple[int, ...] = PROMPT) -> Any:
    """The last event and the tokens of one request."""
    engine.add_request(Request(name, prompt, greedy(6)))
    record = drive(engine)
    return record.finals[name], record.tokens[(name, 0)]


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("kind", ["full", "window", "state"])
def test_a_corrupt_cached_prefix_fails_one_request(kind: str, run_ahead: bool, rig: GetRig) -> None:
    rig_ = rig("lara_mini")
    engine = small_grid(rig_, run_ahead=run_ahead)
    tree = engine._cache.prefixes.tree
    assert ask(engine, "cold")[1] == rig_.oracle(PROMPT, 6)
    group = next(
        i
        for i, g in enumerate(rig_.runner.groups)
        if (kind == "state") == isinstance(g.spec, StateSpec)
        and (kind == "window") == isinstance(g.spec, WindowSpec)
    )
    node = tree.node(PROMPT, 4 if kind == "full" else CACHED)
    corrupt = node.ids[group]
    assert corrupt
    rig_.runner.fill(group, [corrupt], float("nan"))

    end, tokens = ask(engine, "victim")
    assert isinstance(end.error, NonFiniteLogits) and tokens == []
    assert tree.node(PROMPT, CACHED) is tree.root
    held = rig_.runner.read(group, [corrupt])
    assert all(not np.asarray(array, np.float32).any() for array in held.values())

    for name, cached in (("again", 0), ("hit", CACHED)):
        end, tokens = ask(engine, name)
        assert tokens == rig_.oracle(PROMPT, 6)
        assert end.usage.cached_tokens == cached
    later = [Request(f"l{i}", random_prompt(1 + i * 2, i % 2), greedy(4)) for i in range(20)]
    for request in later:
        engine.add_request(request)
    rig_.oracle.check(drive(engine), later)
    rig_.assert_clean(engine)


def test_what_a_failed_request_computed_is_never_cached(rig: GetRig) -> None:
    """Its memory turns NaN in mid-decode, with a step in flight."""
    rig_ = rig("lara_mini")
    engine = small_grid(rig_)
    engine.add_request(Request("victim", PROMPT, greedy(20)))
    events = []
    while sum(len(e.new_token_ids) for e in events) < 12:
        events += engine.step()
    (sequence,) = engine._scheduler.running.values()
    group, pair = next((i, p) for i, p in enumerate(sequence.slots) if p is not None)
    rig_.runner.fill(group, [pair.read], float("nan"))
    record = drive(engine)
    assert isinstance(record.finals["victim"].error, NonFiniteLogits)
    stats = engine.stats()
    assert all(group.free == group.total for group in stats.caches)
    assert ask(engine, "next")[1] == rig_.oracle(PROMPT, 6)
    rig_.assert_clean(engine)


def test_poison_covers_all_that_is_free(rig: GetRig) -> None:
    """With `debug_poison` nothing readable is left in freed pages and slots, and nothing else is
    touched: cached ones serve the next request."""
    rig_ = rig("lara_mini")
    engine = small_grid(rig_, debug_poison=True)
    for g in range(len(rig_.runner.groups)):
        rig_.runner.fill(g, list(range(1, rig_.runner.sizes.counts[g])), 0.0)
    assert ask(engine, "first")[1] == rig_.oracle(PROMPT, 6)
    engine.clear_prefix_cache()
    used = [set(range(1, n)) for n in rig_.runner.sizes.counts]
    engine.add_request(Request("second", random_prompt(1, 0), greedy(1)))
    drive(engine)
    for g, group in enumerate(rig_.runner.groups):
        pool = engine._cache.pools[g]
        free = [i for i in used[g] if pool.is_free(i) and i not in pool.freed]
        cache = rig_.runner._carry.caches[group.layers[0]]
        for array in jax.tree.leaves(cache):
            values = np.asarray(array, np.float32)[free]
            whole = np.isnan(values).reshape(len(free), -1).all(axis=1)
            clean = (values == 0).reshape(len(free), -1).all(axis=1)
            assert (whole | clean).all()  # poisoned, or never used
            assert whole.sum() >= (1 if isinstance(group.spec, StateSpec) else 2)
    assert ask(engine, "third")[1] == rig_.oracle(PROMPT, 6)
    assert ask(engine, "fourth")[0].usage.cached_tokens == CACHED
    rig_.assert_clean(engine)
