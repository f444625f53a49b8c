"""What runs in this process, for people and for whoever routes requests; all fronts say it."""

import platform
from dataclasses import asdict, dataclass
from typing import Any

import jax

import hybrid_jax
from hybrid_jax.engine.types import SwapStats
from hybrid_jax.inspection import KernelChoice, describe_layer, kernel_report
from serving.async_engine import AsyncEngine


@dataclass(frozen=True)
class LayerInfo:
    """One layer in words."""

    kind: str  # full, window or linear
    mixer: str
    feed_forward: str


@dataclass(frozen=True)
class CacheInfo:
    """Use of one cache class; ids are pages, slots or rows."""

    name: str
    total: int
    used: int
    cached: int
    peak: int
    fragmentation: float
    unit_bytes: int  # of one page, slot or row, in all layers of the class
    array_bytes: int  # of the whole class, with the unit that nobody gets


@dataclass(frozen=True)
class ServerInfo:
    """All that can be known about a server without its logs."""

    model: str
    model_type: str
    vocab_size: int
    max_model_len: int
    layers: list[LayerInfo]
    versions: dict[str, str]
    platform: str
    devices: list[str]
    engine: dict[str, Any]  # the resolved EngineConfig
    running: int
    waiting: int
    steps: int
    preemptions: int
    recomputed_tokens: int
    swap: SwapStats
    compiles: int
    parameter_bytes: int
    caches: list[CacheInfo]
    kernels: list[KernelChoice]


def server_info(engine: AsyncEngine, model_name: str) -> ServerInfo:
    """A snapshot."""
    stats, config, model = engine.stats(), engine.config, engine.model_config
    parameter_bytes, *array_bytes = engine.live_bytes.values()
    return ServerInfo(
        model=model_name,
        model_type=model.model_type,
        vocab_size=model.vocab_size,
        max_model_len=config.max_model_len,
        layers=[LayerInfo(*describe_layer(layer)) for layer in model.layers],
        versions={
            "hybrid_jax": hybrid_jax.__version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
        platform=jax.default_backend(),
        devices=[device.device_kind for device in jax.devices()],
        engine=asdict(config),
        running=stats.running,
        waiting=stats.waiting,
        steps=stats.steps,
        preemptions=stats.preemptions,
        recomputed_tokens=stats.recomputed_tokens,
        swap=stats.swap,
        compiles=stats.compiles,
        parameter_bytes=parameter_bytes,
        caches=[
            CacheInfo(**asdict(group), unit_bytes=nbytes // (group.total + 1), array_bytes=nbytes)
            for group, nbytes in zip(stats.caches, array_bytes, strict=True)
        ],
        kernels=list(kernel_report()),
    )
