"""What a step takes besides what it is given: as the compiler says, or an estimate."""

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from hybrid_jax.cache.arrays import CacheSizes, StateSlots
from hybrid_jax.cache.chips import Chip, this_chip
from hybrid_jax.cache.plan import table_width
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.models.decoder import abstract_params
from hybrid_jax.runtime.batch import StepBatch, StepKind, TokenMasks
from hybrid_jax.runtime.mesh import AXIS, Partitioner
from hybrid_jax.runtime.sampling import SamplingRows
from hybrid_jax.runtime.step import (
    ParameterLayout,
    StepSpec,
    abstract_full,
    init_carry,
    jit_step,
    make_step,
)
from hybrid_jax.specs import CacheGroup, GatedDeltaSpec, MLPSpec, PagedSpec, StateSpec
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
    logits = LOGIT_COPIES * config.row_buckets[-1] * model.vocab_size * 4
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
    with _building_for(devices[0], mesh):
        step, arguments = _abstract_step(model, config, dtype, groups, sizes, partitioner)
        analysis = step.lower(*arguments).compile().memory_analysis()
    if analysis is None:
        return None
    # Outputs that are not the donated carry in place come on top.
    outputs = max(analysis.output_size_in_bytes - analysis.alias_size_in_bytes, 0)
    return Temporaries(analysis.temp_size_in_bytes + outputs, f"compiled for {chip.name}")


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


def _abstract_step(
    model: ModelConfig,
    config: EngineConfig,
    dtype: str,
    groups: tuple[CacheGroup, ...],
    sizes: CacheSizes,
    partitioner: Partitioner,
) -> tuple[Any, tuple[Any, ...]]:
    """The jitted step of a model without weights, and its arguments as shapes."""
    graph, shapes, axes = abstract_params(model, dtype)
    paths = tuple(sorted(shapes))
    leaves = [
        jax.ShapeDtypeStruct(
            shapes[path].shape,
            shapes[path].dtype,
            sharding=partitioner.parameter(path, axes[path]),
        )
        for path in paths
    ]
    replicated = partitioner.replicated
    leaves.append(jax.ShapeDtypeStruct((0,), jnp.float32, sharding=replicated))
    cut = config.tensor_parallel_size > 1
    carry = init_carry(groups, sizes, config, partitioner=partitioner, full=abstract_full)
    sampling = SamplingRows(config.max_num_seqs, max_logit_bias=config.max_logit_bias)
    spec = StepSpec(graph, ParameterLayout(paths, ()), groups, config.max_logprobs, partitioned=cut)
    step = jit_step(make_step(spec), carry, eager=False, sharded=cut)
    batch, table = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
        (_largest_batch(groups, config, model.vocab_size), sampling.device()),
    )
    return step, (tuple(leaves), carry, batch, table)


def _largest_batch(
    groups: Sequence[CacheGroup], config: EngineConfig, vocab_size: int
) -> StepBatch:
    """A mixed batch of the largest bucket, as shapes."""
    tokens, rows = config.token_buckets[-1], config.row_buckets[-1]
    array: Callable[..., Any] = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731

    def table(group: CacheGroup) -> Any:
        if isinstance(group.spec, StateSpec):
            return StateSlots(array(rows), array(rows), array(rows), array(rows))
        assert isinstance(group.spec, PagedSpec)
        return array(rows, table_width(group.spec, config))

    arrays: Any = {
        "token_ids": array(tokens),
        "positions": array(tokens),
        "query_start_loc": array(rows + 1),
        "seq_lens": array(rows),
        "row_ids": array(rows),
        "counts": array(2),
        "tables": tuple(table(group) for group in groups),
    }
    arrays["masks"] = TokenMasks(
        jax.ShapeDtypeStruct((rows,), jnp.bool_),  # type: ignore[arg-type]
        array(rows, -(-vocab_size // 32)),
    )
    return StepBatch(**arrays, kind=StepKind.MIXED)
