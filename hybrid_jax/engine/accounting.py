"""What an engine holds: its pools in bytes, and what the device says."""

from collections.abc import Iterable
from dataclasses import asdict

from hybrid_jax.engine.cache_manager import CacheManager
from hybrid_jax.engine.types import Sequence, StepRunner
from hybrid_jax.memory.snapshot import MemorySnapshot, PoolMemory
from hybrid_jax.specs import StateSpec, WindowSpec


def take_snapshot(
    runner: StepRunner, cache: CacheManager, running: Iterable[Sequence]
) -> MemorySnapshot:
    """The memory of an engine now. `running`: the sequences that hold pages and slots."""
    live, sizes, sequences = runner.live_bytes(), runner.sizes, list(running)
    pools = []
    for i, (group, use) in enumerate(zip(runner.groups, cache.stats(sequences), strict=False)):
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
