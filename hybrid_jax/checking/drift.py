"""How far decoding drifts when recurrent states are stored in bfloat16.

A state is rounded once per token and read again by the next, so that errors may add up over
thousands of tokens where those of activations cannot.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hybrid_jax.cache.arrays import CacheSizes, LayerCache, StateSlots, layer_specs
from hybrid_jax.cache.plan import model_groups, table_width
from hybrid_jax.config import EngineConfig
from hybrid_jax.layers.context import StepContext
from hybrid_jax.loading import LoadedModel
from hybrid_jax.models.decoder import Decoder, bind
from hybrid_jax.runtime.step import init_carry
from hybrid_jax.specs import CacheGroup, StateSpec
from pallas_kernels.ragged import RaggedBatch

BLOCK = 256  # tokens per call of the compiled loop
FIRST_ROW = 64  # tokens of the first line of the report

Caches = tuple[LayerCache, ...]


@dataclass(frozen=True)
class DriftRow:
    """Divergence over the tokens from `start` to `end`."""

    start: int
    end: int
    max_difference: float  # of a logit
    mean_difference: float  # of all logits
    relative: float  # mean_difference over the standard deviation of the logits
    kl_divergence: float  # of the next token's distribution from that with float32, nats, mean
    agreement: float  # share of tokens with the same most likely token


@dataclass(frozen=True)
class DriftReport:
    """What `measure_drift` found."""

    rows: tuple[DriftRow, ...]  # up to powers of two
    first_difference: int | None  # tokens until the most likely token differs for the first time

    @property
    def worst(self) -> float:
        """The largest `relative` of a row."""
        return max(row.relative for row in self.rows)


def measure_drift(
    model: LoadedModel, num_tokens: int = 0, *, first_token: int = 1, seed: int = 0
) -> DriftReport:
    """Decodes one sequence with both kinds of states and compares the logits of every token.

    Both see the same tokens: drawn from the float32 model's distribution, since greedy decoding of
    a small model soon repeats itself, and a loop says little about a text.

    Args:
        model: a model with linear-attention layers.
        num_tokens: tokens to decode; 0: the model's longest sequence, at most 8,192.
        first_token: what the sequence begins with. seed: of the draws.

    Raises:
        ValueError: the model has no such layers, or no so many positions.
    """
    longest = model.config.max_position
    num_tokens = num_tokens or min(longest, 8192)
    if "linear" not in model.config.layer_counts:
        raise ValueError(
            f"{model.config.model_type} has no linear-attention layers: state_dtype changes nothing"
        )
    if not 1 <= num_tokens <= longest:
        raise ValueError(f"tokens {num_tokens} must be between 1 and the model's {longest}")
    config = EngineConfig(
        max_num_seqs=1, max_model_len=-(-num_tokens // BLOCK) * BLOCK, max_num_batched_tokens=1
    ).resolve(model.config)
    groups, wide = _fresh(model, config, "float32")
    _, narrow = _fresh(model, config, "bfloat16")
    tables = _tables(groups, config)
    token = jnp.array([first_token], jnp.int32)
    blocks = []
    for start in range(0, num_tokens, BLOCK):
        key = jax.random.fold_in(jax.random.key(seed), start)
        arguments = (model.params, tables, wide, narrow, token, jnp.int32(start), key)
        wide, narrow, token, found = _decode_block(model.graph, *arguments)
        blocks.append(np.asarray(found))
    return _report(np.concatenate(blocks)[:num_tokens])


def _fresh(
    model: LoadedModel, config: EngineConfig, state_dtype: str
) -> tuple[tuple[CacheGroup, ...], Caches]:
    """Cache groups and caches of one sequence, which owns page 1, 2, ... and slot 1."""
    groups = model_groups(model.config, replace(config, state_dtype=state_dtype), model.dtype)
    counts = tuple(
        2 if isinstance(group.spec, StateSpec) else table_width(group.spec, config) + 1
        for group in groups
    )
    return groups, init_carry(groups, CacheSizes(config.page_size, counts), config).caches


def _tables(groups: tuple[CacheGroup, ...], config: EngineConfig) -> tuple[Any, ...]:
    one = jnp.ones(1, jnp.int32)
    by_group = [
        StateSlots(one, one, one, one)
        if isinstance(group.spec, StateSpec)
        else jnp.arange(1, table_width(group.spec, config) + 1, dtype=jnp.int32)[None]
        for group in groups
    ]
    return tuple(by_group[group] for group, _ in layer_specs(groups))


@partial(jax.jit, static_argnums=0, donate_argnums=(3, 4))
def _decode_block(
    graph: Any,
    params: Any,
    tables: tuple[Any, ...],
    wide: Caches,
    narrow: Caches,
    token: jax.Array,
    start: jax.Array,
    key: jax.Array,
) -> tuple[Caches, Caches, jax.Array, jax.Array]:
    """BLOCK tokens from position `start`.

    Returns both caches, the next token i32[1] and one row of `_diff` per token, f32[BLOCK, 5].
    """
    model = bind(graph, params)

    def step(carry: tuple[Any, ...], i: jax.Array) -> tuple[tuple[Any, ...], jax.Array]:
        wide, narrow, token = carry
        expected, wide = _next_logits(model, token, start + i, wide, tables)
        actual, narrow = _next_logits(model, token, start + i, narrow, tables)
        token = jax.random.categorical(jax.random.fold_in(key, i), expected)[None]
        return (wide, narrow, token.astype(jnp.int32)), _diff(expected, actual)

    carry = (wide, narrow, token)
    (wide, narrow, token), found = lax.scan(step, carry, jnp.arange(BLOCK, dtype=jnp.int32))
    return wide, narrow, token, found


def _next_logits(
    model: Decoder, token: jax.Array, position: jax.Array, caches: Caches, tables: tuple[Any, ...]
) -> tuple[jax.Array, Caches]:
    """Logits f32[V] after one token i32[1] at `position`."""
    ragged = RaggedBatch(
        jnp.array([0, 1], jnp.int32), position[None] + 1, jnp.ones(2, jnp.int32), True
    )
    hidden, caches = model(token, position[None], caches, tables, StepContext(ragged, {}))
    return model.logits(hidden)[0], caches


def _diff(expected: jax.Array, actual: jax.Array) -> jax.Array:
    """Max and mean difference, standard deviation, KL divergence, same argmax: f32[5]."""
    gap = jnp.abs(expected - actual)
    log_p, log_q = jax.nn.log_softmax(expected), jax.nn.log_softmax(actual)
    same = jnp.argmax(expected) == jnp.argmax(actual)
    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q))
    return jnp.stack([jnp.max(gap), jnp.mean(gap), jnp.std(expected), kl, same.astype(jnp.float32)])


def _report(found: np.ndarray) -> DriftReport:
    different = np.flatnonzero(found[:, 4] == 0)
    rows = tuple(
        DriftRow(
            start + 1,
            end,
            float(part[:, 0].max()),
            float(part[:, 1].mean()),
            float(part[:, 1].mean() / part[:, 2].mean()),
            float(part[:, 3].mean()),
            float(part[:, 4].mean()),
        )
        for start, end in _spans(len(found))
        if len(part := found[start:end])
    )
    return DriftReport(rows, int(different[0]) + 1 if len(different) else None)


def _spans(count: int) -> Iterator[tuple[int, int]]:
    """From zero to each power of two, each beginning where the last ended."""
    start, end = 0, FIRST_ROW
    while start < count:
        yield start, min(end, count)
        start, end = end, 2 * end
