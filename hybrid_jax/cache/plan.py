"""How many pages and slots each cache group gets, and what they weigh."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from hybrid_jax.cache.arrays import CacheSizes
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.specs import CacheGroup, PagedSpec, StateSpec, WindowSpec, cache_groups, cache_spec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachePlan:
    """Cache groups of a model and their sizes."""

    groups: tuple[CacheGroup, ...]
    sizes: CacheSizes

    def group_bytes(self, index: int) -> int:
        """Bytes of all layers of one group, null page or slot included."""
        group, count = self.groups[index], self.sizes.counts[index]
        return len(group.layers) * count * unit_bytes(group, self.sizes.page_size)

    @property
    def total_bytes(self) -> int:
        """Bytes of all caches."""
        return sum(self.group_bytes(i) for i in range(len(self.groups)))


def model_groups(model: ModelConfig, config: EngineConfig, dtype: str) -> tuple[CacheGroup, ...]:
    """The cache groups of a model whose activations have `dtype`."""
    kv_dtype = dtype if config.kv_dtype == "auto" else config.kv_dtype
    return cache_groups(
        [cache_spec(layer.mixer, kv_dtype=kv_dtype, conv_dtype=dtype) for layer in model.layers]
    )


def unit_bytes(group: CacheGroup, page_size: int) -> int:
    """Bytes of one page or slot in one layer of a group."""
    if isinstance(group.spec, StateSpec):
        return group.spec.nbytes
    return group.spec.bytes_per_token * page_size


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens from position 0 reach into."""
    return -(-num_tokens // page_size)


def first_live_page(num_computed_tokens: int, window: int, page_size: int) -> int:
    """The first logical page that the token at position `num_computed_tokens` can see."""
    return max(0, num_computed_tokens - window + 1) // page_size


def window_table_width(window: int, max_num_batched_tokens: int, page_size: int) -> int:
    """Columns of a window group's page table, a ring: logical page i is in column i % width.

    A step of n tokens at position c reads positions c - window + 1 to c + n - 1. They reach into
    at most this many pages for every n a step can have, so no two live pages share a column.
    """
    return pages_for(window + max_num_batched_tokens, page_size) + 1


def table_width(spec: PagedSpec, config: EngineConfig) -> int:
    """M: columns of the page table of a group with this spec. `config` is resolved."""
    whole = pages_for(config.max_model_len, config.page_size)  # never wraps; a window may be huge
    if isinstance(spec, WindowSpec):
        ring = window_table_width(spec.window, config.max_num_batched_tokens, config.page_size)
        return min(ring, whole)
    return whole


def plan_caches(model: ModelConfig, config: EngineConfig, dtype: str) -> CachePlan:
    """Sizes every cache group for `config.max_num_seqs` sequences. `config` is resolved.

    State slots and window pages have a fixed bound per sequence and are always granted in full;
    what the byte budget leaves goes to full-attention pages, up to `max_num_seqs` sequences of
    `max_model_len` tokens.

    Raises:
        ValueError: the fixed part alone exceeds the budget; the message says what would fit.
    """
    groups = model_groups(model, config, dtype)
    fixed = [_fixed_count(group, config) for group in groups]
    budget = config.cache_bytes or default_budget(config)
    page = config.page_size
    fixed_bytes = sum(
        len(group.layers) * count * unit_bytes(group, page)
        for group, count in zip(groups, fixed, strict=True)
        if count is not None
    )
    full = [group for group, count in zip(groups, fixed, strict=True) if count is None]
    least = pages_for(config.max_model_len, page) + 1
    per_page = sum(len(group.layers) * unit_bytes(group, page) for group in full)
    if fixed_bytes + least * per_page > budget:
        raise ValueError(_too_small(config, budget, fixed_bytes, least * per_page))
    wanted = config.num_pages or (least - 1) * config.max_num_seqs + 1
    pages = wanted
    if per_page:
        pages = min(wanted, (budget - fixed_bytes) // per_page)
    if pages < wanted:
        logger.warning(
            "full-attention pages clamped from %d to %d: %d bytes are left for them",
            wanted,
            pages,
            budget - fixed_bytes,
        )
    counts = tuple(pages if count is None else count for count in fixed)
    return CachePlan(groups, CacheSizes(page, counts))


def _fixed_count(group: CacheGroup, config: EngineConfig) -> int | None:
    """Pages or slots of a group with a bound per sequence, null included; None: it grows."""
    spec, seqs, page = group.spec, config.max_num_seqs, config.page_size
    if isinstance(spec, StateSpec):
        return seqs + config.num_checkpoints + 1
    if not isinstance(spec, WindowSpec):
        return None
    # A sequence holds the pages that its window touches; the chunks in flight are shared by all
    # rows of a step, with one partial page each. When a step runs ahead of the last one's results
    # there are two: pages leave a window when their step is known to be good.
    window = min(pages_for(spec.window, page) + 1, pages_for(config.max_model_len, page))
    chunks = 2 if config.run_ahead else 1
    return seqs * (window + 1) + chunks * pages_for(config.max_num_batched_tokens, page) + 1


def default_budget(config: EngineConfig) -> int:
    """Bytes for caches when none are given: a share of what the device, or the host, has free."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        free = stats["bytes_limit"] * config.memory_utilization - stats.get("bytes_in_use", 0)
        return max(int(free) * config.tensor_parallel_size, 0)
    pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return int(pages * size * config.memory_utilization)


def _too_small(config: EngineConfig, budget: int, fixed: int, full: int) -> str:
    return (
        f"{config.max_num_seqs} sequences need {fixed} bytes of state and window pages and one "
        f"sequence of max_model_len {config.max_model_len} needs {full} bytes of full-attention "
        f"pages, but only {budget} bytes are free for caches; lower max_num_seqs or max_model_len"
    )


@dataclass(frozen=True)
class CacheLine:
    """What one cache group costs, over all its layers, without padding."""

    kind: str  # full, window or linear
    layers: tuple[int, ...]
    bytes_per_token: int
    bytes_per_sequence: int


def describe(groups: Sequence[CacheGroup], max_model_len: int) -> tuple[CacheLine, ...]:
    """One line per cache group, for a sequence of `max_model_len` tokens."""
    return tuple(_line(group, max_model_len) for group in groups)


def _line(group: CacheGroup, max_model_len: int) -> CacheLine:
    spec, count = group.spec, len(group.layers)
    if isinstance(spec, StateSpec):
        return CacheLine("linear", group.layers, 0, count * spec.nbytes)
    per_token = count * spec.bytes_per_token
    if isinstance(spec, WindowSpec):
        kept = min(spec.window, max_model_len)
        return CacheLine("window", group.layers, per_token, per_token * kept)
    return CacheLine("full", group.layers, per_token, per_token * max_model_len)
