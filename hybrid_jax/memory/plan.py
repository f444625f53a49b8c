"""The memory plan: parameters, caches, rows and temporaries of a model on one device."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from hybrid_jax.cache.chips import (
    UNPADDED,
    Chip,
    available_bytes,
    device_bytes,
    format_bytes,
    this_chip,
)
from hybrid_jax.cache.plan import (
    CachePlan,
    Placement,
    cache_sizes,
    model_groups,
    plan_caches,
)
from hybrid_jax.config import MOST_BATCHED_TOKENS, EngineConfig, ModelConfig
from hybrid_jax.memory import formulas, temporaries
from hybrid_jax.memory.temporaries import Temporaries
from hybrid_jax.models.decoder import abstract_params
from hybrid_jax.runtime.mesh import Partitioner, abstract_mesh
from hybrid_jax.runtime.sampling import SamplingRows
from hybrid_jax.runtime.step import abstract_full, init_carry
from hybrid_jax.specs import CacheGroup, StateSpec

TemporariesFrom = Literal["compiler", "estimate"]
MOST_SEQUENCES = 2**16 - 1  # as far as concurrency is worth counting


@dataclass(frozen=True)
class MemoryLine:
    """One class of memory on one device. Parameters and temporaries have no units."""

    name: str
    layers: int
    unit: Literal["page", "slot", "row", ""]
    count: int  # units, the null unit included
    nbytes: int
    padding: int  # bytes of `nbytes` that no element uses
    tails: int  # bytes expected to be empty at the ends of sequences, half a page each


@dataclass(frozen=True)
class Concurrency:
    """How many sequences of `context` tokens the same bytes hold, by each formula."""

    context: int
    layer_by_layer: int
    unified_pages: int
    largest_layer: int
    bytes_by_layer: int  # of one sequence
    bytes_unified: int
    bytes_largest: int


@dataclass(frozen=True)
class MemoryPlan:
    """What each of `config.tensor_parallel_size` devices holds."""

    model: ModelConfig
    chip: Chip
    dtype: str
    available: int  # bytes to fill: memory_utilization of the device, less what others hold
    parameters: int  # bytes
    temporaries: Temporaries
    caches: CachePlan

    @property
    def config(self) -> EngineConfig:
        """Resolved, with what was clamped."""
        return self.caches.config

    @property
    def rows(self) -> int:
        """Bytes of histories, owners and sampling parameters."""
        return row_bytes(self.caches.groups, self.config, self.chip.platform)

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.parameters + self.caches.total_bytes + self.rows + self.temporaries.nbytes

    @property
    def cache_budget(self) -> int:
        """Bytes that caches and rows could fill."""
        if self.config.cache_bytes:
            return self.config.cache_bytes
        return max(self.available - self.parameters - self.temporaries.nbytes, 0)

    def lines(self) -> tuple[MemoryLine, ...]:
        """One line per class, caches in the order of their groups."""
        rows = self.config.max_num_seqs + 1
        return (
            MemoryLine("parameters", len(self.model.layers), "", 0, self.parameters, 0, 0),
            *(self._group_line(i) for i in range(len(self.caches.groups))),
            MemoryLine("rows", 0, "row", rows, self.rows, 0, 0),
            MemoryLine("step temporaries", 0, "", 0, self.temporaries.nbytes, 0, 0),
        )

    def _group_line(self, index: int) -> MemoryLine:
        plan = self.caches
        group, count = plan.groups[index], plan.sizes.counts[index]
        nbytes = plan.group_bytes(index)
        bare = replace(plan, placement=replace(plan.placement, platform=UNPADDED))
        paged = not isinstance(group.spec, StateSpec)
        return MemoryLine(
            group.name,
            len(group.layers),
            "page" if paged else "slot",
            count,
            nbytes,
            nbytes - bare.group_bytes(index),
            nbytes * self.config.max_num_seqs // (2 * count) if paged else 0,
        )

    def at(self, context: int) -> "MemoryPlan":
        """The plan if all `max_num_seqs` sequences had room for `context` tokens each.

        Nothing is clamped: it may take more than is available. Temporaries stay as they are.
        """
        config = replace(self.config, max_model_len=context, num_pages=0)
        caches = replace(self.caches, config=config, sizes=cache_sizes(self.caches.groups, config))
        return replace(self, caches=caches)

    @property
    def most_sequences(self) -> int:
        """As far as `concurrency` counts, by any formula: more of them no step has room for."""
        return _most_sequences(self.config)

    def concurrency(self) -> tuple[Concurrency, ...]:
        """At several context lengths, the model's longest included, if `max_num_seqs` allowed."""
        longest = max(self.model.max_position, self.config.max_model_len)
        contexts = {self.config.max_model_len}
        contexts |= {4**k for k in range(4, 11) if 4**k <= longest}
        return tuple(self._concurrency(context) for context in sorted(contexts))

    def _concurrency(self, context: int) -> Concurrency:
        groups, placement, budget = self.caches.groups, self.caches.placement, self.cache_budget
        rows: Callable[[EngineConfig], int] = lambda config: 0  # noqa: E731
        if not self.config.cache_bytes:
            rows = lambda config: row_bytes(groups, config, self.chip.platform)  # noqa: E731
        sequences = sequences_that_fit(groups, self.config, placement, budget, context, rows)
        unified = formulas.unified_bytes(groups, self.config, placement, context)
        largest = formulas.largest_layer_bytes(groups, self.config, placement, context)
        return Concurrency(
            context,
            sequences,
            min(budget // unified, self.most_sequences),
            min(budget // largest, self.most_sequences),
            bytes_per_sequence(groups, self.config, placement, context, rows),
            unified,
            largest,
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "model_type": self.model.model_type,
            "chip": self.chip.name,
            "dtype": self.dtype,
            "tensor_parallel_size": self.config.tensor_parallel_size,
            "max_num_seqs": self.config.max_num_seqs,
            "max_model_len": self.config.max_model_len,
            "available": self.available,
            "total": self.total,
            "temporaries_source": self.temporaries.source,
            "classes": [vars(line) for line in self.lines()],
            "concurrency": [vars(line) for line in self.concurrency()],
        }


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    dtype: str,
    *,
    chip: Chip | None = None,
    loaded: bool = False,
    temporaries_from: TemporariesFrom = "compiler",
) -> MemoryPlan:
    """Plans a model on `config.tensor_parallel_size` devices of `chip`. Needs no weights.

    Args:
        model: the model.
        config: what `plan_caches` clamps and refuses.
        dtype: of weights and activations.
        chip: None: the default device, less what it holds already. Otherwise one with nothing else.
        loaded: whether the parameters are on the default device already.
        temporaries_from: whether to compile the largest step, where there is a compiler for it.

    Raises:
        ValueError: the parameters do not fit, or as `plan_caches` does.
    """
    size = config.tensor_parallel_size
    mesh = abstract_mesh(size)
    partitioner = Partitioner(model, mesh)
    target = chip or this_chip()
    placement = Placement(
        target.platform,
        lambda spec, shape, axes: partitioner.cache(spec, shape, axes).shard_shape(shape),
    )
    parameters = parameter_bytes(partitioner, dtype, target.platform)
    if chip is None:
        available = available_bytes(config.memory_utilization, loaded=parameters if loaded else 0)
    else:
        available = int(chip.memory_bytes * config.memory_utilization)
    groups = model_groups(model, config, dtype)
    needed = _temporaries(model, config, dtype, groups, target, temporaries_from)
    budget = available - parameters - needed.nbytes
    if budget <= 0 and not config.cache_bytes:
        raise ValueError(
            f"parameters ({format_bytes(parameters)}) and a step's temporaries "
            f"({format_bytes(needed.nbytes)}) do not fit the {format_bytes(available)} to fill on "
            f"{target.name}; raise memory_utilization {config.memory_utilization} or "
            f"tensor_parallel_size {size}, or lower max_num_batched_tokens or max_num_seqs"
        )
    caches = plan_caches(
        model,
        config,
        dtype,
        budget=budget,
        placement=placement,
        row_bytes=lambda config: row_bytes(groups, config, target.platform),
    )
    return MemoryPlan(model, target, dtype, available, parameters, needed, caches)


def parameter_bytes(partitioner: Partitioner, dtype: str, platform: str) -> int:
    """Bytes of a model's parameters on one device."""
    _, shapes, axes = abstract_params(partitioner.model, dtype)
    vectors, total = 0, 0
    for path, shape in shapes.items():
        cut = partitioner.parameter(path, axes[path]).shard_shape(shape.shape)
        if len(cut) == 1 and shape.dtype == "float32":
            vectors += math.prod(cut)  # they travel joined, see `ParameterLayout`
        else:
            total += device_bytes(cut, shape.dtype, platform)
    return total + device_bytes((vectors,), "float32", platform)


def row_bytes(groups: tuple[CacheGroup, ...], config: EngineConfig, platform: str) -> int:
    """Bytes of histories, owners and sampling parameters on one device. `config` is resolved."""
    carry = init_carry(groups, cache_sizes(groups, config), config, full=abstract_full)
    arrays = jax.tree.leaves((carry.owners, carry.last_token, carry.history))
    sampling = SamplingRows(0, max_logit_bias=config.max_logit_bias).row_nbytes
    return sum(device_bytes(array.shape, array.dtype, platform) for array in arrays) + (
        (config.max_num_seqs + 1) * sampling
    )


def sequences_that_fit(
    groups: tuple[CacheGroup, ...],
    config: EngineConfig,
    placement: Placement,
    budget: int,
    context: int,
    row_bytes: Callable[[EngineConfig], int] = lambda config: 0,
) -> int:
    """Sequences of `context` tokens, all at full length, that `budget` bytes hold.

    `config` is resolved; its `max_num_seqs`, `max_model_len` and checkpoints do not matter.
    """

    def fits(count: int) -> bool:
        return (
            count <= _most_sequences(config)
            and _bytes_of(groups, config, placement, count, context, row_bytes) <= budget
        )

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _most_sequences(config: EngineConfig) -> int:
    return min(MOST_SEQUENCES, MOST_BATCHED_TOKENS // config.tokens_per_decode)


def bytes_per_sequence(
    groups: tuple[CacheGroup, ...],
    config: EngineConfig,
    placement: Placement,
    context: int,
    row_bytes: Callable[[EngineConfig], int] = lambda config: 0,
) -> int:
    """What one more sequence of `context` tokens takes, beside what all sequences share."""
    few, many = (
        _bytes_of(groups, config, placement, count, context, row_bytes) for count in (64, 128)
    )
    return (many - few) // 64


def _bytes_of(
    groups: tuple[CacheGroup, ...],
    config: EngineConfig,
    placement: Placement,
    count: int,
    context: int,
    row_bytes: Callable[[EngineConfig], int],
) -> int:
    """Bytes of caches and rows for `count` sequences of `context` tokens."""
    changed = replace(
        config,
        max_num_seqs=count,
        max_model_len=context,
        num_pages=0,
        num_checkpoints=0,
        max_num_batched_tokens=max(config.max_num_batched_tokens, count * config.tokens_per_decode),
    )
    plan = CachePlan(groups, cache_sizes(groups, changed), changed, placement)
    return plan.total_bytes + row_bytes(changed)


def _temporaries(
    model: ModelConfig,
    config: EngineConfig,
    dtype: str,
    groups: tuple[CacheGroup, ...],
    chip: Chip,
    source: TemporariesFrom,
) -> Temporaries:
    """For the configuration before anything is clamped, on caches of the least size."""
    wanted = config.resolve(model)
    if source == "compiler":
        small = cache_sizes(groups, replace(wanted, max_num_seqs=1))
        found = temporaries.compiled(model, wanted, dtype, groups, small, chip)
        if found is not None:
            return found
    return temporaries.estimate(model, wanted)
