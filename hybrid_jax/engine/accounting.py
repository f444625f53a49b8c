"""What an engine holds: its pools in units and in bytes, and what the device says."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict

from hybrid_jax.engine.cache_manager import CacheManager
from hybrid_jax.engine.scheduler import Scheduler
from hybrid_jax.engine.speculation import Speculation
from hybrid_jax.engine.step_clock import Phase
from hybrid_jax.engine.types import EngineStats, GroupStats, Sequence, StepRunner
from hybrid_jax.memory.snapshot import MemorySnapshot, PoolMemory
from hybrid_jax.specs import StateSpec, WindowSpec


def take_stats(
    cache: CacheManager,
    scheduler: Scheduler,
    speculation: Speculation,
    *,
    waiting: int,
    steps: int,
    compiles: int,
    phase_seconds: Mapping[Phase, float],
) -> EngineStats:
    """The counters of an engine now. May be called while a step runs."""
    running = list(scheduler.running.values())
    return EngineStats(
        running=len(running),
        waiting=waiting,
        steps=steps,
        preemptions=scheduler.num_preemptions,
        compiles=compiles,
        phase_seconds=phase_seconds,
        prompt_tokens=cache.num_prompt_tokens,
        cached_tokens=cache.num_cached_tokens,
        recomputed_tokens=cache.num_recomputed_tokens,
        swap=cache.swap.stats(),
        speculation=speculation.stats(),
        caches=group_stats(cache, running),
    )


def group_stats(cache: CacheManager, running: Iterable[Sequence]) -> tuple[GroupStats, ...]:
    """Use of every cache group, in their order, and of the persistent rows."""
    sequences, result = list(running), []
    for i, pool in enumerate([*cache.pools, cache.rows]):
        name = f"{i}:{cache.kind(i)}" if i < len(cache.pools) else "rows"
        waste = 0.0
        if i in cache.page_groups and pool.num_used:
            empty = sum(_empty_places(cache, i, sequence) for sequence in sequences)
            waste = empty / (pool.num_used * cache.page_size)
        result.append(
            GroupStats(name, pool.capacity, pool.num_used, pool.num_idle, pool.peak, waste)
        )
    return tuple(result)


def _empty_places(cache: CacheManager, i: int, sequence: Sequence) -> int:
    """Places in the pages of a sequence that hold no token a later step reads."""
    pages, window = sequence.pages, cache.page_groups[i].window  # read once: it may end meanwhile
    run = pages[i] if pages else None
    if run is None:
        return 0
    computed, first = sequence.num_computed_tokens, run.first * cache.page_size
    if window is not None:
        first = max(first, computed - window + 1)
    return len(run.ids) * cache.page_size - max(0, computed - first)


def take_snapshot(
    runner: StepRunner, cache: CacheManager, running: Iterable[Sequence]
) -> MemorySnapshot:
    """The memory of an engine now. `running`: the sequences that hold pages and slots."""
    live, sizes, sequences = runner.live_bytes(), runner.sizes, list(running)
    pools = []
    for i, (group, use) in enumerate(
        zip(runner.groups, group_stats(cache, sequences), strict=False)
    ):
        unit_bytes = live.groups[i] // sizes.counts[i]
        pools.append(
            PoolMemory(
                name=group.name,
                unit="slot" if isinstance(group.spec, StateSpec) else "page",
                unit_bytes=unit_bytes,
                total=use.total,
                used=use.used,
                cached=use.cached,
                peak=use.peak,
                fragmentation=use.fragmentation,
            )
        )
    config = {k: v for k, v in asdict(runner.config).items() if not isinstance(v, list | tuple)}
    config["num_pages"] = max(
        (
            count
            for group, count in zip(runner.groups, sizes.counts, strict=True)
            if not isinstance(group.spec, StateSpec | WindowSpec)
        ),
        default=0,
    )
    by_class = {group.name: n for group, n in zip(runner.groups, live.groups, strict=True)}
    return MemorySnapshot(
        model_type=runner.model_config.model_type,
        dtype=live.dtype,
        chip=live.chip,
        config=config,
        live={"parameters": live.parameters, **by_class, "rows": live.rows},
        pools=tuple(pools),
        device=live.device,
    )
