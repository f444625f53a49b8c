"""The compiled step: one ragged batch through the model, one sampled token per row.

A VERIFY step samples after every token of a row instead: what comes if the tokens so far are right.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hybrid_jax.cache.arrays import CacheSizes, MakeArray, StateSlots, layer_specs, make_cache
from hybrid_jax.config import EngineConfig
from hybrid_jax.layers.context import StepContext
from hybrid_jax.models.decoder import Decoder, Params, bind
from hybrid_jax.runtime.batch import Carry, StepBatch, StepKind, StepOutput
from hybrid_jax.runtime.logprobs import Logprobs, prompt_logprobs
from hybrid_jax.runtime.mesh import Partitioner
from hybrid_jax.runtime.sampling import LogitsProcessor, SamplingTable, sample
from hybrid_jax.specs import CacheGroup, CacheSpec, StateSpec
from pallas_kernels import platform, registry
from pallas_kernels.storage import encode

Leaves = tuple[jax.Array, ...]
Shape = tuple[int, ...]
StepFunction = Callable[[Leaves, Carry, StepBatch, SamplingTable], tuple[StepOutput, Carry]]


@dataclass(frozen=True)
class ParameterLayout:
    """How parameters become the flat tuple of leaves that a step takes.

    Every leaf costs dispatch time in every step. A flat tuple is several times cheaper than a
    nested state, and float32 vectors (norm weights, gates; about half of all parameters by number)
    travel joined in the last leaf.
    """

    paths: tuple[str, ...]
    joined: tuple[tuple[str, int], ...]  # path and size of each vector in the last leaf

    @classmethod
    def of(cls, params: Params) -> "ParameterLayout":
        """The layout for `params`. Vectors that are cut over a mesh stay leaves of their own."""
        small = [
            path
            for path, array in sorted(params.items())
            if array.ndim == 1 and array.dtype == jnp.float32 and array.is_fully_replicated
        ]
        return cls(
            tuple(path for path in sorted(params) if path not in small),
            tuple((path, params[path].size) for path in small),
        )

    def pack(self, params: Params) -> Leaves:
        """The leaves, in order."""
        vectors = [params[path] for path, _ in self.joined]
        joined = jnp.concatenate(vectors) if vectors else jnp.zeros(0, jnp.float32)
        return (*(params[path] for path in self.paths), joined)

    def unpack(self, leaves: Leaves) -> Params:
        """Parameters by path again; inside the step, where slicing the vector is free."""
        params = dict(zip(self.paths, leaves[:-1], strict=True))
        start = 0
        for path, size in self.joined:
            params[path] = leaves[-1][start : start + size]
            start += size
        return params


@dataclass(frozen=True)
class StepSpec:
    """Everything static that a step is built from."""

    graph: Any
    layout: ParameterLayout
    groups: tuple[CacheGroup, ...]
    max_logprobs: int
    processors: tuple[LogitsProcessor, ...] = ()
    partitioned: bool = False  # parameters and caches are cut over several devices
    implementations: Mapping[str, str] = field(default_factory=dict)  # op -> what must run it


def init_carry(
    groups: tuple[CacheGroup, ...],
    sizes: CacheSizes,
    config: EngineConfig,
    *,
    fill: float = 0.0,
    partitioner: Partitioner | None = None,
    full: Callable[..., Any] = jnp.full,
) -> Carry:
    """Fresh caches, owners, rows and histories. `config` is resolved.

    Args:
        groups: cache groups. sizes: pages or slots of each.
        fill: what caches hold before anything is written; tests use NaN.
        partitioner: cuts the caches over a mesh.
        full: makes an array, as `jax.numpy.full` does; `abstract_full` makes none.
    """

    def make_for(spec: CacheSpec) -> MakeArray:
        def make(shape: Shape, dtype: DTypeLike, axes: tuple[str | None, ...]) -> jax.Array:
            sharding = partitioner.cache(spec, shape, axes) if partitioner else None
            value = encode(jnp.full((), fill, jnp.float32), dtype)
            return full(shape, value, dtype, device=sharding)

        return make

    caches = [
        make_cache(spec, sizes.counts[group], sizes.page_size, make_for(spec))
        for group, spec in layer_specs(groups)
    ]
    zeros = lambda *shape: full(  # noqa: E731
        shape, 0, jnp.int32, device=partitioner.replicated if partitioner else None
    )
    rows = config.max_num_seqs + 1
    owners = tuple(
        zeros(count)
        for group, count in zip(groups, sizes.counts, strict=True)
        if isinstance(group.spec, StateSpec)
    )
    return Carry(tuple(caches), owners, zeros(rows), zeros(rows, config.max_positions))


def abstract_full(
    shape: Shape, value: object, dtype: DTypeLike, *, device: jax.sharding.Sharding | None
) -> jax.ShapeDtypeStruct:
    """What `jax.numpy.full` would make, without memory."""
    del value
    return jax.ShapeDtypeStruct(shape, dtype, sharding=device)


def make_step(spec: StepSpec, on_trace: Callable[[], None] = lambda: None) -> StepFunction:
    """The step as a pure function of (leaves, carry, batch, sampling); not yet jitted.

    `on_trace` is called each time JAX traces it: once per bucket.
    """
    group_of_layer = [group for group, _ in layer_specs(spec.groups)]

    def step(
        leaves: Leaves, carry: Carry, batch: StepBatch, sampling: SamplingTable
    ) -> tuple[StepOutput, Carry]:
        on_trace()
        model = bind(spec.graph, spec.layout.unpack(leaves))
        ragged = batch.ragged
        num_tokens = batch.token_ids.shape[0]
        rows = jnp.minimum(ragged.token_rows(num_tokens), ragged.num_rows_padded)
        row_of_token = jnp.append(batch.row_ids, jnp.int32(0))[rows]
        tokens = jnp.where(batch.token_ids < 0, carry.last_token[row_of_token], batch.token_ids)
        history = carry.history.at[row_of_token, batch.positions].set(tokens)
        tables = tuple(batch.tables[group] for group in group_of_layer)
        with registry.partitioned(spec.partitioned), registry.forcing(spec.implementations):
            context = StepContext(ragged, {}, verify=batch.kind is StepKind.VERIFY)
            seen: dict[int, jax.Array] = {}
            hidden, caches = model(
                tokens, batch.positions, carry.caches, tables, context, on_layer=seen.__setitem__
            )
        last = jnp.maximum(batch.query_start_loc[1:] - 1, 0)
        verify = batch.kind is StepKind.VERIFY
        sources = hidden if verify else hidden[last]
        logits = model.logits(sources)
        with jax.named_scope("sample"):
            sampled = sample(
                logits,
                sampling,
                row_of_token if verify else batch.row_ids,
                batch.positions + 1 if verify else batch.seq_lens,
                history,
                masks=batch.masks,
                max_logprobs=spec.max_logprobs,
                processors=spec.processors,
            )
        with jax.named_scope("owners"):
            owner_ok, owners = check_owners(carry.owners, batch)
        output = StepOutput(
            tokens=sampled.tokens,
            logprobs=sampled.logprobs,
            usable=sampled.usable,
            finite=sampled.finite & jnp.all(jnp.isfinite(sources), axis=-1),
            owner_ok=owner_ok,
            prompt_logprobs=_prompt_logprobs(batch, model, hidden, spec.max_logprobs),
            logits=_returned_logits(batch, model, logits, hidden),
            hidden=tuple(seen[count] for count in batch.returns.hidden),
        )
        last_token = carry.last_token
        if not verify:  # the host says which of the tokens counts
            last_token = last_token.at[batch.row_ids].set(sampled.tokens)
        return output, Carry(caches, owners, last_token, history)

    return step


def _prompt_logprobs(
    batch: StepBatch, model: Decoder, hidden: jax.Array, count: int
) -> Logprobs | None:
    """Of the batch's targets, if it has any."""
    if batch.targets is None:
        return None
    with jax.named_scope("prompt_logprobs"):
        return prompt_logprobs(
            model.logits,
            hidden,
            batch.targets,
            num_rows=batch.seq_lens.shape[0],
            count=count,
        )


def _returned_logits(
    batch: StepBatch, model: Decoder, logits: jax.Array, hidden: jax.Array
) -> jax.Array | None:
    """What the caller of the step wants to see; `logits` are those that were sampled from."""
    wanted = batch.returns.logits
    if wanted == "all" and batch.kind is not StepKind.VERIFY:
        return model.logits(hidden)
    return logits if wanted != "none" else None


def check_owners(
    owners: Sequence[jax.Array], batch: StepBatch
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Compares the owner of every state row read with the expected one, and writes new owners.

    Returns:
        bool[S] whether all reads of the row were of its own state, and the updated owners.
    """
    ok = jnp.ones(batch.seq_lens.shape, jnp.bool_)
    has_state = batch.ragged.has_state
    updated = []
    slots = [table for table in batch.tables if isinstance(table, StateSlots)]
    for owner, table in zip(owners, slots, strict=True):
        ok &= ~has_state | (owner[table.read] == table.read_owner)
    for owner, table in zip(owners, slots, strict=True):
        # What came of a wrong state is nobody's: whoever shares it is told as well.
        new = jnp.where(ok, table.write_owner, 0)
        per_slot = new.reshape(-1, *[1] * (table.write.ndim - 1))
        updated.append(owner.at[table.write].set(per_slot))
    return ok, tuple(updated)


def jit_step(
    step: StepFunction, carry: Carry | None, *, eager: bool, sharded: bool
) -> StepFunction:
    """Compiles the step, donating the carry; `eager` returns it as it is, for debugging.

    `carry` is needed for its shardings only, when `sharded`.
    """
    if eager:
        # Loops trace their bodies even so, and a traced index cannot look into a numpy array.
        return lambda leaves, carry, batch, sampling: step(
            leaves, carry, jax.device_put(batch), sampling
        )
    options: dict[str, Any] = {}
    if platform.current().platform == "cpu":
        # Without it XLA:CPU copies whole page pools around the in-place updates.
        options["compiler_options"] = {"xla_cpu_copy_insertion_use_region_analysis": True}
    if sharded:
        # Pins the carry to the shardings it came with, so that the next step finds it there.
        shardings = jax.tree.map(lambda array: array.sharding, carry)
        options["out_shardings"] = (None, shardings)
    return jax.jit(step, donate_argnums=1, **options)
