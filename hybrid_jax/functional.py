"""The functional level: a model, its caches and the compiled step as plain values.

Nothing is hidden in objects: the carry goes in and comes out, so research code can read it, edit it
or keep several of them. `LLM` and the engine are built on the same step.

Example: greedy decoding of one sequence by hand.

>>> from hybrid_jax import EngineConfig, functional as F
>>> from hybrid_jax.bundled import bundled_model
>>> model = F.load_model(bundled_model(), dtype="float32")
>>> config = EngineConfig(
...     max_num_seqs=2, max_model_len=128, max_num_batched_tokens=32, cache_bytes=2**28
... ).resolve(model.config)
>>> plan = F.plan_caches(model.config, config, model.dtype)
>>> step, carry = F.make_step(model, plan, config), F.init_carry(plan, config)
>>> sampling = F.greedy(config)
>>> prompt = [5, 17, 200, 31]
>>> batch = F.sequence_batch(plan, config, prompt, start=0, prefill=True)
>>> output, carry = step(carry, batch, sampling)
>>> tokens = [int(output.tokens[0])]
>>> for _ in range(7):
...     position = len(prompt) + len(tokens) - 1
...     batch = F.sequence_batch(plan, config, tokens[-1:], start=position)
...     output, carry = step(carry, batch, sampling)
...     tokens.append(int(output.tokens[0]))
>>> tokens == F.generate(model, prompt, max_tokens=8)  # the cache-free oracle agrees
True
>>> [type(cache).__name__ for cache in carry.caches]  # one per layer, by what it must remember
['StateCache', 'PagedCache', 'StateCache', 'PagedCache', 'PagedCache']
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.cache.arrays import StateSlots
from hybrid_jax.cache.plan import CachePlan, table_width
from hybrid_jax.cache.plan import plan_caches as plan_caches
from hybrid_jax.config import EngineConfig
from hybrid_jax.generate import generate as generate
from hybrid_jax.loading import LoadedModel
from hybrid_jax.loading import load_model as load_model
from hybrid_jax.runtime import step as compiled
from hybrid_jax.runtime.batch import Carry, StepBatch, StepKind, StepOutput
from hybrid_jax.runtime.sampling import LogitsProcessor, SamplingTable
from hybrid_jax.runtime.sampling import SamplingRows as SamplingRows
from hybrid_jax.specs import PagedSpec, StateSpec

Step = Callable[[Carry, StepBatch, SamplingTable], tuple[StepOutput, Carry]]


def init_carry(plan: CachePlan, config: EngineConfig) -> Carry:
    """Fresh caches for `plan`. `config` is resolved."""
    return compiled.init_carry(plan.groups, plan.sizes, config)


def make_step(
    model: LoadedModel,
    plan: CachePlan,
    config: EngineConfig,
    processors: tuple[LogitsProcessor, ...] = (),
    *,
    jit: bool = True,
) -> Step:
    """The compiled step over `model`: (carry, batch, sampling) -> (output, carry).

    The carry given to it is donated: use the one it returns. `config` is resolved. With `jit` False
    it is the traceable function, to be compiled as a part of yours.
    """
    layout = compiled.ParameterLayout.of(model.params)
    leaves = layout.pack(model.params)
    spec = compiled.StepSpec(
        model.graph,
        layout,
        plan.groups,
        config.max_logprobs,
        processors,
        implementations=config.implementations,
    )
    step = compiled.make_step(spec)
    if jit:
        step = compiled.jit_step(step, None, eager=config.enforce_eager, sharded=False)
    return lambda carry, batch, sampling: step(leaves, carry, batch, sampling)


def greedy(config: EngineConfig) -> SamplingTable:
    """Sampling parameters that make every row greedy."""
    return SamplingRows(config.max_num_seqs, max_logit_bias=config.max_logit_bias).device()


def sequence_batch(
    plan: CachePlan,
    config: EngineConfig,
    token_ids: Sequence[int],
    *,
    start: int,
    prefill: bool = False,
    reach: int = 0,
) -> StepBatch:
    """A batch of one sequence that owns row 1, slot 1 and the first pages of every pool.

    Args:
        plan: cache plan. config: resolved.
        token_ids: tokens at positions start, start + 1, ...; exactly one unless `prefill`.
        start: tokens computed before.
        prefill: whether this is a piece of the prompt.
        reach: tokens that the page tables cover, if more than these: for loops on the device.

    Raises:
        ValueError: the tokens do not fit the step's or the model's limit.
    """
    count, end = len(token_ids), start + len(token_ids)
    if max(end, reach) > config.max_model_len or not 1 <= count <= config.max_num_batched_tokens:
        raise ValueError(
            f"{count} tokens from position {start}, reach {reach}, do not fit "
            f"max_num_batched_tokens {config.max_num_batched_tokens} and max_model_len "
            f"{config.max_model_len}"
        )
    if not prefill and count != 1:
        raise ValueError(f"a decode step takes one token, got {count}; pass prefill=True")
    rows = config.row_buckets[0]
    width = next(t for t in config.token_buckets if t >= max(count, rows)) if prefill else rows
    tokens, positions = np.zeros(width, np.int32), np.zeros(width, np.int32)
    tokens[:count], positions[:count] = token_ids, np.arange(start, end)
    first = lambda value: jnp.array([value] + [0] * (rows - 1), jnp.int32)  # noqa: E731
    return StepBatch(
        token_ids=jnp.asarray(tokens),
        positions=jnp.asarray(positions),
        query_start_loc=jnp.array([0] + [count] * rows, jnp.int32),
        seq_lens=first(end),
        row_ids=first(1),
        counts=jnp.array([0 if prefill else 1, 1], jnp.int32),
        tables=tuple(
            StateSlots(first(1), first(1), first(1), first(1))
            if isinstance(group.spec, StateSpec)
            else _table(group.spec, config, rows, max(end, reach))
            for group in plan.groups
        ),
        kind=StepKind.MIXED if prefill else StepKind.DECODE,
    )


def _table(spec: PagedSpec, config: EngineConfig, rows: int, end: int) -> jax.Array:
    """Logical page i is page 1 + i % width: the same page for the same column, always."""
    width = table_width(spec, config)
    table = np.zeros((rows, width), np.int32)
    last = (end - 1) // config.page_size
    for page in range(max(0, last - width + 1), last + 1):
        table[0, page % width] = 1 + page % width
    return jnp.asarray(table)
