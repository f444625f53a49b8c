"""What a step takes besides what it is given: as the compiler says, or an estimate."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from hybrid_jax.cache.arrays import CacheSizes
from hybrid_jax.cache.chips import Chip, this_chip
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.runtime.abstract_step import abstract_step
from hybrid_jax.runtime.batch import StepKind
from hybrid_jax.runtime.logprobs import PROMPT_BLOCK
from hybrid_jax.runtime.mesh import AXIS, Partitioner
from hybrid_jax.specs import CacheGroup, GatedDeltaSpec, MLPSpec
from pallas_kernels import platform

MIXED_COPIES = 6  # arrays of a layer's width alive at once; what compiled steps come to
LOGIT_COPIES = 4  # logits, and what sampling makes of them


@dataclass(frozen=True)
class Temporaries:
    """Bytes on one device, and where the number comes from."""

    nbytes: int
    source: str


def estimate(model: ModelConfig, config: EngineConfig) -> Temporaries:
    """A guess from the widths of the layers, for where there is no compiler. `config` resolved."""
    widths = [model.hidden_size]
    for layer in model.layers:
        if isinstance(layer.ffn, MLPSpec):
            widths.append(2 * layer.ffn.intermediate_size)
        else:
            widths.append(2 * layer.ffn.top_k * layer.ffn.intermediate_size)
        if isinstance(layer.mixer, GatedDeltaSpec):
            widths.append(2 * layer.mixer.num_v_heads * (layer.mixer.k_dim + layer.mixer.v_dim))
        else:
            widths.append(2 * layer.mixer.num_heads * layer.mixer.head_dim)
    layers = MIXED_COPIES * config.token_buckets[-1] * max(widths) * 4
    sampled = config.row_buckets[-1] * config.tokens_per_decode
    rows = max(sampled, min(PROMPT_BLOCK, config.token_buckets[-1]))
    logits = LOGIT_COPIES * rows * model.vocab_size * 4
    return Temporaries((layers + logits) // config.tensor_parallel_size, "estimated")


def compiled(
    model: ModelConfig,
    config: EngineConfig,
    dtype: str,
    groups: tuple[CacheGroup, ...],
    sizes: CacheSizes,
    chip: Chip,
) -> Temporaries | None:
    """What the compiler reports for the largest bucket; None: there is none here for `chip`.

    TPUs need libtpu but no TPU. Nothing is allocated. The caches may be small: what a step needs
    does not depend on how many pages there are. `config` is resolved.
    """
    devices = _devices(chip, config.tensor_parallel_size)
    if devices is None:
        return None
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    partitioner = Partitioner(model, mesh)
    kinds = [StepKind.MIXED, *([StepKind.VERIFY] if config.num_speculative_tokens else [])]
    most = 0
    for kind in kinds:
        with _building_for(devices[0], mesh):
            step = abstract_step(model, config, dtype, groups, sizes, kind, partitioner)
            analysis = step.lower().compile().memory_analysis()
        if analysis is None:
            return None
        # Outputs that are not the donated carry in place come on top.
        outputs = max(analysis.output_size_in_bytes - analysis.alias_size_in_bytes, 0)
        most = max(most, analysis.temp_size_in_bytes + outputs)
    return Temporaries(most, f"compiled for {chip.name}")


def _devices(chip: Chip, count: int) -> list[Any] | None:
    """Devices to compile for: those at hand, or those of a topology; None: neither."""
    here = this_chip()
    if (chip.platform, chip.kind) == (here.platform, here.kind):
        found = jax.devices()
    elif chip.topology and importlib.util.find_spec("libtpu"):
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask
        os.environ.setdefault("TPU_LOG_DIR", "disabled")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # it guards devices; none here
        found = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices
    else:
        return None
    return list(found[:count]) if len(found) >= count else None


@contextmanager
def _building_for(device: Any, mesh: Mesh) -> Iterator[None]:
    """Selects kernels for a device that may not be here."""
    name = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    with (
        platform.target(name, device.device_kind),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        yield
