"""Owns what is on the device: parameters, the carry and the compiled step."""

import functools
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.cache.arrays import CacheSizes
from hybrid_jax.cache.chips import check_float8
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.loading import LoadedModel, load_config, load_model
from hybrid_jax.loading.kv_ranges import check_ranges
from hybrid_jax.memory import tables
from hybrid_jax.memory.plan import MemoryPlan, plan_memory
from hybrid_jax.memory.snapshot import LiveBytes
from hybrid_jax.models.decoder import abstract_params
from hybrid_jax.runtime.batch import Carry, StepBatch, StepKind, StepOutput, TokenMasks
from hybrid_jax.runtime.memory import CarryMemory
from hybrid_jax.runtime.mesh import Partitioner, make_mesh
from hybrid_jax.runtime.processors import check_processors
from hybrid_jax.runtime.sampling import LogitsProcessor, SamplingRows, SamplingTable
from hybrid_jax.runtime.step import ParameterLayout, StepSpec, init_carry, jit_step, make_step
from hybrid_jax.specs import CacheGroup, StateSpec

logger = logging.getLogger(__name__)


class Runner:
    """Runs steps of one model.

    Args:
        model: parameters, already placed on the mesh's devices if there is one.
        config: not yet resolved.
        processors: named logits processors, compiled into the step.
        fill: what fresh caches hold; tests use NaN.

    Raises:
        ValueError: the configuration does not fit the model, or a processor cannot run.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        processors: Mapping[str, LogitsProcessor] | None = None,
        fill: float = 0.0,
    ) -> None:
        processors = processors or {}
        self._plan = _plan_here(model, config)
        self._config = self._plan.config
        check_processors(processors, self._config, model.config.vocab_size)
        self._model = model
        self._fill = fill
        mesh = make_mesh(self._config.tensor_parallel_size)
        self._partitioner = Partitioner(model.config, mesh) if mesh is not None else None
        for line in self._partitioner.refusals() if self._partitioner else ():
            logger.info("tensor parallelism: %s", line)
        if self._config.compilation_cache:
            enable_compilation_cache()
        self._replicated = self._partitioner.replicated if self._partitioner else None
        self.sampling_rows = SamplingRows(
            self._config.max_num_seqs,
            max_logit_bias=self._config.max_logit_bias,
            processors=tuple(processors),
            sharding=self._replicated,
        )
        layout = ParameterLayout.of(model.params)
        self._leaves = layout.pack(model.params)
        spec = StepSpec(
            model.graph,
            layout,
            self.groups,
            self._config.max_logprobs,
            tuple(processors.values()),
            partitioned=self._partitioner is not None,
            implementations=self._config.implementations,
        )
        self._no_masks = functools.cache(self._make_no_masks)
        self._no_targets = functools.cache(self._make_no_targets)
        self._num_traces = 0
        self._fingerprint: str | None = None
        self._carry = self._fresh_carry()
        self._traced = make_step(spec)
        self._step = jit_step(
            make_step(spec, self._count_trace),
            self._carry,
            eager=self._config.enforce_eager,
            sharded=self._partitioner is not None,
        )
        self._memory = CarryMemory(self.groups, self._carry, sharded=self._partitioner is not None)

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration."""
        return self._config

    @property
    def model_config(self) -> ModelConfig:
        """The model that runs."""
        return self._model.config

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups, in the order of `StepBatch.tables`."""
        return self._plan.caches.groups

    @property
    def sizes(self) -> CacheSizes:
        """Pages or slots per cache group."""
        return self._plan.caches.sizes

    @property
    def plan(self) -> MemoryPlan:
        """What the device holds, in bytes."""
        return self._plan

    @property
    def num_compiles(self) -> int:
        """Steps traced so far: one per bucket used, when jitted."""
        return self._num_traces

    def live_bytes(self) -> LiveBytes:
        """What the arrays weigh on the first device, as the runtime says."""
        carry = self._carry
        by_group = [[carry.caches[i] for i in group.layers] for group in self.groups]
        rows = (carry.owners, carry.last_token, carry.history, self.sampling_rows.device())
        stats = jax.local_devices()[0].memory_stats() or {}
        names = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
        return LiveBytes(
            chip=self._plan.chip.name,
            dtype=self._model.dtype,
            parameters=_weigh(self._leaves),
            groups=tuple(_weigh(caches) for caches in by_group),
            rows=_weigh(rows),
            device={name: stats[name] for name in names if name in stats},
        )

    def step(self, batch: StepBatch, sampling: SamplingTable) -> StepOutput:
        """Launches one step and returns without waiting for its results."""
        output, self._carry = self._step(self._leaves, self._carry, self.complete(batch), sampling)
        return output

    def compiled(self, batch: StepBatch) -> jax.stages.Compiled:
        """The step of a batch's bucket as `step` compiled it, to be read. Not when eager."""
        step: Any = self._step
        sampling = self.sampling_rows.device()
        return step.lower(self._leaves, self._carry, self.complete(batch), sampling).compile()

    def complete(self, batch: StepBatch) -> StepBatch:
        """The batch with what nobody asks for in it, as arrays that are on the device already.

        So batches with and without masks or targets share one trace, and nothing is uploaded.
        """
        if batch.masks is None:
            sampled = batch.token_ids if batch.kind is StepKind.VERIFY else batch.seq_lens
            batch = replace(batch, masks=self._no_masks(sampled.shape[0]))
        if batch.targets is None and batch.kind is StepKind.MIXED:
            batch = replace(batch, targets=self._no_targets(batch.token_ids.shape[0]))
        return batch

    def copy(self, group: int, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies pages of one cache group; steps launched from now on see it."""
        self._carry = self._memory.copy(self._carry, group, source, target)

    def fill(self, group: int, ids: Sequence[int], value: float) -> None:
        """Overwrites pages or slots of one cache group; steps launched from now on see it."""
        self._carry = self._memory.fill(self._carry, group, ids, value)

    def set_history(self, row: int, token_ids: Sequence[int]) -> None:
        """Tells `row` its first tokens, which no step will feed because they are computed."""
        self._carry = self._memory.set_history(self._carry, row, token_ids)

    def read(self, group: int, ids: Sequence[int]) -> dict[str, np.ndarray]:
        """What pages or slots of one cache group hold: "<layer>.<name>" -> [ids, ...]."""
        return self._memory.read(self._carry, group, ids)

    def write(
        self, group: int, ids: Sequence[int], arrays: Mapping[str, np.ndarray], owner: int
    ) -> None:
        """Undoes `read`, for steps launched from now on; slots belong to `owner`."""
        self._carry = self._memory.write(self._carry, group, ids, arrays, owner)

    @property
    def fingerprint(self) -> str:
        """Names the parameters (some values of each), the model and the dtypes of the caches."""
        if self._fingerprint is None:
            described = repr((self._model.config, self._model.dtype, self.groups))
            digest = hashlib.sha256(described.encode())
            digest.update(np.asarray(_sample(self._leaves)).tobytes())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def reset(self) -> None:
        """Makes fresh caches after a step that failed, whatever happened to the old ones."""
        del self._carry  # or both would be in memory at once
        self._carry = self._fresh_carry()

    def prepare(self, batches: Iterable[StepBatch]) -> None:
        """Readies the buckets of `batches`, which must hold padding only.

        `config.warmup` compiles them. Otherwise, if `config.implementations` names any, they are
        only traced: one that cannot run would fail every request.

        Raises:
            ValueError: an implementation that `config.implementations` names cannot run.
        """
        sampling, start = self.sampling_rows.device(), time.monotonic()
        if self._config.warmup:
            for batch in batches:
                jax.block_until_ready(self.step(batch, sampling))
            for group, shared in enumerate(self.groups):
                if not isinstance(shared.spec, StateSpec):
                    self.copy(group, [0], [0])
                self.fill(group, [0], 0.0)
                if self._config.swap_bytes:
                    self.write(group, [0], self.read(group, [0]), 0)
            self.set_history(0, [0])
            logger.info("compiled %d steps in %.1f s", self._num_traces, time.monotonic() - start)
        elif self._config.implementations:
            for batch in batches:
                batch = self.complete(batch)
                jax.eval_shape(self._traced, self._leaves, self._carry, batch, sampling)

    def _make_no_masks(self, rows: int) -> TokenMasks:
        """Masks that bar nothing, for so many sampled tokens."""
        where = self._replicated
        shape = (rows, -(-self.model_config.vocab_size // 32))
        return TokenMasks(
            jnp.zeros(rows, jnp.bool_, device=where), jnp.zeros(shape, jnp.int32, device=where)
        )

    def _make_no_targets(self, tokens: int) -> jax.Array:
        """For so many tokens, that nobody asks for log probabilities of prompts."""
        return jnp.full(tokens, -1, jnp.int32, device=self._replicated)

    def _fresh_carry(self) -> Carry:
        return init_carry(
            self.groups,
            self.sizes,
            self._config,
            fill=self._fill,
            partitioner=self._partitioner,
        )

    def _count_trace(self) -> None:
        self._num_traces += 1


def _plan_here(model: LoadedModel, config: EngineConfig) -> MemoryPlan:
    """The plan for the default device. Raises ValueError as `plan_memory` and the checks do."""
    # Host memory is elastic, so that on CPU a guess of the temporaries saves a compilation.
    source = "estimate" if jax.default_backend() == "cpu" else "compiler"
    plan = plan_memory(model.config, config, model.dtype, loaded=True, temporaries_from=source)
    if config.kv_dtype == "fp8":
        check_float8(plan.chip)
    check_ranges(model.config, config.kv_dtype, config.kv_ranges)
    logger.info("%s", tables.plan_line(plan))
    return plan


@jax.jit
def _sample(leaves: tuple[jax.Array, ...]) -> jax.Array:
    """Up to 16 values of every leaf, spread evenly: f32[...]."""
    flat = (leaf.reshape(-1) for leaf in leaves)
    some = [leaf[:: max(1, leaf.size // 16)][:16].astype(jnp.float32) for leaf in flat]
    return jnp.concatenate(some)


def _weigh(tree: object) -> int:
    """Bytes of all arrays of a tree on the first device of each."""
    shards = [array.addressable_shards[0].data for array in jax.tree.leaves(tree)]
    return sum(shard.on_device_size_in_bytes() for shard in shards)


def open_model(path: str | Path, *, dtype: str, config: EngineConfig) -> LoadedModel:
    """Loads a model, cut over the devices if `config.tensor_parallel_size` says so.

    Raises:
        ModelError: the checkpoint does not fit. ValueError: too few devices.
    """
    mesh = make_mesh(config.tensor_parallel_size)
    if mesh is None:
        return load_model(path, dtype=dtype, kv_ranges=config.kv_ranges)
    model, _ = load_config(path)
    partitioner = Partitioner(model, mesh)
    _, _, axes = abstract_params(model, "float32")
    shardings = {name: partitioner.parameter(name, names) for name, names in axes.items()}
    return load_model(path, dtype=dtype, shardings=shardings, kv_ranges=config.kv_ranges)


def enable_compilation_cache() -> None:
    """Keeps compiled steps across starts, in JAX's cache directory if the user set one."""
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(Path(root) / "hybrid-jax" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
