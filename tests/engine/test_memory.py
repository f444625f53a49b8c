"""Cache memory: planned to the byte, donated, and never copied or converted by a step."""

import math
import re
from pathlib import Path

import jax
import pytest

from hybrid_jax.cache.chips import find_chip
from hybrid_jax.cache.plan import plan_caches
from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.batch_builder import BatchBuilder
from hybrid_jax.engine.cache_manager import CacheManager
from hybrid_jax.loading import load_model
from hybrid_jax.memory.plan import plan_memory
from hybrid_jax.runtime.batch import StepKind
from hybrid_jax.runtime.runner import Runner, open_model
from tests.helpers import tiny
from tests.helpers.real_engine import engine_config

HLO_NAMES = {"float32": "f32", "uint16": "u16", "bfloat16": "bf16", "int32": "s32"}


def make_runner(name: str, dtype: str, directory: Path, **options: object) -> Runner:
    tiny.write_checkpoint(name, directory, seed=0)
    return Runner(load_model(directory, dtype=dtype), engine_config(**options))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(tiny.TINY))
def test_the_plan_is_what_the_arrays_weigh(
    name: str, dtype: str, size: int, tmp_path: Path
) -> None:
    """Every class, within 1 % or the alignment of its arrays, on each of one or two devices."""
    directory = tiny.write_checkpoint(name, tmp_path, seed=0)
    config = engine_config(tensor_parallel_size=size, num_checkpoints=3, prefix_cache=True)
    runner = Runner(open_model(directory, dtype=dtype, config=config), config)
    carry = runner._carry
    by_group = [[carry.caches[layer] for layer in group.layers] for group in runner.groups]
    rows = (carry.owners, carry.last_token, carry.history, runner.sampling_rows.device())
    lines = runner.plan.lines()
    for line, tree in zip(lines, (runner._leaves, *by_group, rows), strict=False):
        arrays = jax.tree.leaves(tree)
        live = sum(array.addressable_shards[0].data.nbytes for array in arrays)
        assert abs(line.nbytes - live) <= max(0.01 * live, 64 * len(arrays)), line.name
    assert [line.name for line in lines[len(by_group) + 1 :]] == ["rows", "step temporaries"]
    for i, caches in enumerate(by_group):
        counts = {array.shape[0] for array in jax.tree.leaves(caches)}
        assert counts == {runner.sizes.counts[i]} == {lines[i + 1].count}


def test_large_caches_are_planned_within_one_percent(tmp_path: Path) -> None:
    """Where alignment is nothing; the runtime's own figures."""
    runner = make_runner("lara_mini", "bfloat16", tmp_path, num_pages=5000, max_model_len=1024)
    live, plan = runner.live_bytes(), runner.plan
    planned = [line.nbytes for line in plan.lines()]
    measured = [live.parameters, *live.groups, live.rows]
    assert planned[:-1] == pytest.approx(measured, rel=0.01)
    assert plan.total == sum(planned)


@pytest.mark.parametrize("name", ["lara_mini", "gemma3"])
def test_planned_temporaries_are_those_of_the_real_step(name: str, tmp_path: Path) -> None:
    """Compiled from shapes alone, on the smallest caches."""
    runner = make_runner(name, "float32", tmp_path)
    plan = plan_memory(runner.model_config, engine_config(), "float32", chip=find_chip("cpu"))
    assert plan.temporaries.source == "compiled for cpu"
    builder = BatchBuilder(
        CacheManager(runner.groups, runner.sizes, runner.config),
        runner.config,
        runner.model_config.vocab_size,
    )
    batch = max(builder.padding_batches(), key=lambda b: b.kind is StepKind.MIXED)
    arguments = (
        runner._leaves,
        runner._carry,
        runner.complete(batch),
        runner.sampling_rows.device(),
    )
    analysis = runner._step.lower(*arguments).compile().memory_analysis()  # type: ignore[attr-defined]
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    real = analysis.temp_size_in_bytes + outputs
    # Joined vectors are cut apart inside the real step.
    assert plan.temporaries.nbytes == pytest.approx(real, rel=0.05)


def test_a_budget_is_kept_and_used(tmp_path: Path) -> None:
    """What the fixed part leaves goes to full-attention pages, down to less than one page."""
    directory = tiny.write_checkpoint("lara_mini", tmp_path, seed=0)
    model = load_model(directory, dtype="float32").config
    config = EngineConfig(max_num_seqs=3, max_model_len=256, page_size=4).resolve(model)
    wanted = plan_caches(model, config, "float32")
    full = next(i for i, g in enumerate(wanted.groups) if 3 in g.layers)
    page = wanted.group_bytes(full) // wanted.sizes.counts[full]
    assert wanted.sizes.counts[full] == 3 * 64 + 1
    for missing in (1, page, 100 * page):
        budget = wanted.total_bytes - missing
        small = EngineConfig(
            max_num_seqs=3, max_model_len=256, page_size=4, cache_bytes=budget
        ).resolve(model)
        plan = plan_caches(model, small, "float32")
        assert budget - page < plan.total_bytes <= budget
        assert plan.sizes.counts[full] == wanted.sizes.counts[full] - math.ceil(missing / page)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [StepKind.DECODE, StepKind.MIXED])
def test_a_step_neither_copies_nor_converts_a_pool(
    kind: StepKind, dtype: str, tmp_path: Path
) -> None:
    """In the compiled step of a model with full, window and linear layers."""
    # Pools whose sizes appear nowhere else in the program.
    runner = make_runner("lara_mini-untied", dtype, tmp_path, num_pages=4001, num_checkpoints=13)
    cache = CacheManager(runner.groups, runner.sizes, runner.config)
    builder = BatchBuilder(cache, runner.config, runner.model_config.vocab_size)
    batch = next(b for b in builder.padding_batches() if b.kind is kind)
    carry = runner._carry
    arguments = (runner._leaves, carry, runner.complete(batch), runner.sampling_rows.device())
    compiled = runner._step.lower(*arguments).compile()  # type: ignore[attr-defined]
    text = compiled.as_text()

    pools = jax.tree.leaves(carry.caches)
    assert {pool.dtype.name for pool in pools} == (
        {"float32"} if dtype == "float32" else {"uint16", "float32"}
    )
    for pool in pools:
        shape = ",".join(map(str, pool.shape))
        own = HLO_NAMES[pool.dtype.name]
        seen = set(re.findall(rf"(\w+)\[{shape}\]", text))
        assert own in seen
        same_shape = {HLO_NAMES[p.dtype.name] for p in pools if p.shape == pool.shape}
        assert seen == same_shape, f"a pool {own}[{shape}] is converted to {seen - same_shape}"
        assert not re.search(rf"= {own}\[{shape}\]\S* copy(-start)?\(", text)
    # Nor the same number of elements in another shape.
    sizes = {pool.size for pool in pools}
    for match in re.finditer(r"= (\w+)\[([\d,]+)\]\S* (copy|convert|copy-start)\(", text):
        elements = math.prod(int(n) for n in match[2].split(","))
        assert elements not in sizes, match[0]

    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert aliased >= runner.plan.caches.total_bytes
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < min(pool.nbytes for pool in pools if pool.shape[0] == 4001)


def test_a_step_gives_back_the_memory_it_was_given(tmp_path: Path) -> None:
    """Donation happens: the buffers of the old carry are gone, and the new ones lie in place."""
    runner = make_runner("lara_mini-untied", "float32", tmp_path, num_pages=4001)
    cache = CacheManager(runner.groups, runner.sizes, runner.config)
    builder = BatchBuilder(cache, runner.config, runner.model_config.vocab_size)
    batch = next(iter(builder.padding_batches()))
    before = jax.tree.leaves(runner._carry)
    addresses = [leaf.unsafe_buffer_pointer() for leaf in before]
    jax.block_until_ready(runner.step(batch, runner.sampling_rows.device()))
    assert all(leaf.is_deleted() for leaf in before)
    after = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(runner._carry)]
    assert addresses == after
