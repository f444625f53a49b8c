"""The step of a model without weights: what there is to trace or compile, without any array."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from hybrid_jax.cache.arrays import CacheSizes, StateSlots
from hybrid_jax.cache.plan import table_width
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.models.decoder import abstract_params
from hybrid_jax.runtime.batch import Carry, StepBatch, StepKind, TokenMasks
from hybrid_jax.runtime.mesh import Partitioner
from hybrid_jax.runtime.sampling import SamplingRows
from hybrid_jax.runtime.step import (
    ParameterLayout,
    StepSpec,
    abstract_full,
    init_carry,
    jit_step,
    make_step,
)
from hybrid_jax.specs import CacheGroup, PagedSpec, StateSpec


@dataclass(frozen=True)
class AbstractStep:
    """A step and the shapes of its arguments: parameter leaves, carry, batch, sampling table."""

    fn: Callable[..., Any]
    arguments: tuple[Any, ...]
    sharded: bool

    @property
    def carry(self) -> Carry:
        """The shapes of the caches and of all else that outlives a step."""
        return self.arguments[1]

    def trace(self) -> None:
        """Makes every choice of a kernel that the step makes, and nothing else."""
        jax.eval_shape(self.fn, *self.arguments)

    def lower(self) -> jax.stages.Lowered:
        """Jitted as the runner does it, with the carry donated."""
        step: Any = jit_step(self.fn, self.carry, eager=False, sharded=self.sharded)
        return step.lower(*self.arguments)


def abstract_step(
    model: ModelConfig,
    config: EngineConfig,
    dtype: str,
    groups: tuple[CacheGroup, ...],
    sizes: CacheSizes,
    kind: StepKind,
    partitioner: Partitioner,
) -> AbstractStep:
    """The step of the largest bucket of `kind`. Kernels are chosen when it is traced.

    `config` is resolved. The mesh of `partitioner` need not be of devices that are here.
    """
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
    rows = SamplingRows(config.max_num_seqs, max_logit_bias=config.max_logit_bias)
    spec = StepSpec(
        graph,
        ParameterLayout(paths, ()),
        groups,
        config.max_logprobs,
        partitioned=cut,
        implementations=config.implementations,
    )
    batch, table = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
        (_largest_batch(groups, config, model.vocab_size, kind), rows.device()),
    )
    return AbstractStep(make_step(spec), (tuple(leaves), carry, batch, table), cut)


def _largest_batch(
    groups: Sequence[CacheGroup], config: EngineConfig, vocab_size: int, kind: StepKind
) -> StepBatch:
    """A batch of the largest bucket, as shapes."""
    rows = config.row_buckets[-1]
    tokens, sampled, write = config.token_buckets[-1], rows, (rows,)
    if kind is StepKind.DECODE:
        tokens = rows
    elif kind is StepKind.VERIFY:
        write = (rows, config.tokens_per_decode)
        tokens = sampled = rows * config.tokens_per_decode
    array: Callable[..., Any] = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731

    def table(group: CacheGroup) -> Any:
        if isinstance(group.spec, StateSpec):
            return StateSlots(array(rows), array(*write), array(rows), array(rows))
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
        jax.ShapeDtypeStruct((sampled,), jnp.bool_),  # type: ignore[arg-type]
        array(sampled, -(-vocab_size // 32)),
    )
    if kind is StepKind.MIXED:
        arrays["targets"] = array(tokens)
    return StepBatch(**arrays, kind=kind)
