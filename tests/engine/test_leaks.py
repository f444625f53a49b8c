"""After any traffic all memory is where it was: ids, device bytes, and the time of a release."""

import gc
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.integrity import check_integrity
from hybrid_jax.engine.types import ReleaseReason, Request, Sequence
from hybrid_jax.runtime.runner import Runner
from tests.helpers.engine_checks import Record, greedy, small_config
from tests.helpers.fake_runner import FULL, STATE, FakeRunner, window
from tests.helpers.real_engine import Rig, engine_config, random_prompt

MAX_LEN, BUDGET = 128, 80


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(
        "lara_mini-untied",
        tmp_path_factory.mktemp("leaks"),
        max_model_len=MAX_LEN,
        max_num_batched_tokens=BUDGET,
        token_buckets=(BUDGET,),
        checkpoint_interval=64,
        num_checkpoints=4,
    )


def mixed_requests(rng: random.Random, count: int) -> list[Request]:
    """Random lengths, shared beginnings, exact repeats, and several completions."""
    stems = [random_prompt(rng.choice([5, 30, 65, 70]), seed) for seed in range(4)]
    requests = []
    for i in range(count):
        stem = rng.choice(stems) if rng.random() < 0.6 else ()
        prompt = stem + random_prompt(rng.choice([0, 1, 3, 4, 17]) if stem else 9, rng.randrange(6))
        params = greedy(rng.choice([1, 2, 5, 12]), n=rng.choice([1, 1, 1, 1, 3]), seed=i)
        requests.append(Request(f"r{i}", prompt, params))
    return requests


def serve(engine: Engine, rng: random.Random, requests: list[Request]) -> tuple[Record, int]:
    """Requests trickle in; a third is aborted: queued, in prefill, in decode, or with the last
    token in flight. Returns the record and how many were aborted."""
    record, queue, open_, aborts = Record(), list(requests), {}, 0
    while queue or engine.has_work():
        while queue and len(open_) < 8 and rng.random() < 0.7:
            request = queue.pop()
            engine.add_request(request)
            open_[request.request_id] = rng.choice([None, None, 0, 1, 2, 3, 5, 8])
        for name, steps in list(open_.items()):
            if steps == 0:
                aborts += engine.abort(name)
            open_[name] = None if steps is None else steps - 1
        record.add(engine.step())
        for name in list(open_):
            if name in record.finals:
                del open_[name]
    return record, aborts


def check_traffic(rig: Rig, count: int) -> None:
    rng = random.Random(count)
    requests = mixed_requests(rng, count)
    # Pools for one long sequence and a bit: preemption and eviction all the time.
    engine = rig.engine(longest=100, spare=8)
    serve(engine, rng, requests[:20])  # whatever is made once, is made
    engine.clear_prefix_cache()
    baseline = live_bytes(rig)
    record, aborts = serve(engine, rng, requests[20:])
    stats = engine.stats()
    assert len(record.finals) == count - 20
    assert all(end.finish_reason in ("length", "abort") for end in record.ends.values())
    assert aborts > count // 20
    assert stats.preemptions > count // 100
    assert stats.cached_tokens > stats.prompt_tokens // 20
    rig.assert_clean(engine)
    engine.clear_prefix_cache()
    engine.check_integrity()
    assert all(group.free == group.total for group in engine.stats().caches)
    assert live_bytes(rig) == baseline


def live_bytes(rig: Rig) -> int:
    """Of all arrays on the device, the table of sampling parameters always among them."""
    rig.runner.sampling_rows.device()
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_two_hundred_requests_leave_nothing_behind(rig: Rig) -> None:
    check_traffic(rig, 220)


@pytest.mark.slow
def test_two_thousand_requests_leave_nothing_behind(rig: Rig) -> None:
    check_traffic(rig, 2020)


def test_a_release_takes_no_longer_in_a_large_pool() -> None:
    """Nor does an admission with a prefix hit; with the prefix cache filled before."""

    def seconds(pages: int) -> float:
        config = small_config(max_model_len=512, max_num_batched_tokens=512)
        runner = FakeRunner((FULL, window(9), STATE), (pages, pages, 30), config)
        engine, best = Engine(runner, None), math.inf
        cache, scheduler = engine._cache, engine._scheduler
        for i in range(40):
            sequence = new_sequence(i)
            scheduler.add(sequence)
            while sequence.num_computed_tokens < 400:
                for part in scheduler.schedule().sequences:
                    cache.advance(part)
                    cache.commit(part, part.num_computed_tokens, good=True)
            start = time.perf_counter()
            scheduler.remove(sequence, ReleaseReason.FINISH)
            best = min(best, time.perf_counter() - start)
        check_integrity(cache, [])
        return best

    assert seconds(1_000_000) < 4 * seconds(300)  # best of 40 each; linear would be 3000 times


def new_sequence(i: int) -> Sequence:
    prompt = random_prompt(400, i % 3)
    request = Request(f"r{i}", prompt, greedy(20))
    return Sequence(request, 0, i + 1, i + 1, 0, 20, list(prompt))


@pytest.mark.parametrize("operation", ["copy", "fill"])
def test_memory_between_steps_is_changed_in_place(operation: str, tmp_path: Path) -> None:
    """No operation copies or converts a pool."""
    rig = Rig("lara_mini-untied", tmp_path)
    runner = Runner(rig.model, engine_config(num_pages=4001, num_checkpoints=13))
    memory: Any = runner._memory
    for g in range(len(runner.groups)):
        caches = memory._of_group(runner._carry, g)
        ids = jax.ShapeDtypeStruct((16,), "int32")
        value = ids if operation == "copy" else jax.ShapeDtypeStruct((), "float32")
        compiled = getattr(memory, f"_{operation}")[g].lower(caches, ids, value).compile()
        pools = jax.tree.leaves(caches)
        for found in re.finditer(r"= \w+\[([\d,]+)\]\S* (copy|convert)\(", compiled.as_text()):
            elements = math.prod(int(n) for n in found[1].split(","))
            assert elements not in {pool.size for pool in pools}, found[0]
        used = compiled.memory_analysis()
        assert used.alias_size_in_bytes >= sum(pool.nbytes for pool in pools)
