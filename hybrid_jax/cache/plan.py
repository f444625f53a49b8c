"""How many pages and slots each cache group gets, and what they weigh."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
from jax.typing import DTypeLike

from hybrid_jax.cache.arrays import CacheSizes, make_cache
from hybrid_jax.cache.chips import available_bytes, device_bytes, format_bytes
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.specs import (
    CacheGroup,
    CacheSpec,
    PagedSpec,
    StateSpec,
    WindowSpec,
    cache_groups,
    cache_spec,
)

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]
SHORTEST = 2  # tokens of the shortest request: one of the prompt, one of the output


def model_groups(model: ModelConfig, config: EngineConfig, dtype: str) -> tuple[CacheGroup, ...]:
    """The cache groups of a model whose activations have `dtype`."""
    kv_dtype = {"auto": dtype, "fp8": "float8_e4m3fn"}.get(config.kv_dtype, config.kv_dtype)
    return cache_groups(
        [
            cache_spec(
                layer.mixer, kv_dtype=kv_dtype, conv_dtype=dtype, state_dtype=config.state_dtype
            )
            for layer in model.layers
        ]
    )


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
    whole = pages_for(config.max_positions, config.page_size)  # never wraps; a window may be huge
    if isinstance(spec, WindowSpec):
        ring = window_table_width(spec.window, config.max_num_batched_tokens, config.page_size)
        return min(ring, whole)
    return whole


@dataclass(frozen=True)
class Placement:
    """Where caches lie: the platform, and the part of an array that one device holds."""

    platform: str
    shard: Callable[[CacheSpec, Shape, tuple[str | None, ...]], Shape] = lambda _, shape, axes: (
        shape
    )


@dataclass(frozen=True)
class CachePlan:
    """Cache groups of a model and their sizes, and the configuration that fits them."""

    groups: tuple[CacheGroup, ...]
    sizes: CacheSizes
    config: EngineConfig  # resolved
    placement: Placement

    def group_bytes(self, index: int) -> int:
        """Bytes of one group on one device: null page or slot and padding included."""
        group, count = self.groups[index], self.sizes.counts[index]
        return len(group.layers) * layer_bytes(
            group.spec, count, self.sizes.page_size, self.placement
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all caches on one device."""
        return sum(self.group_bytes(i) for i in range(len(self.groups)))


def layer_bytes(spec: CacheSpec, count: int, page_size: int, placement: Placement) -> int:
    """Bytes that `count` pages or slots of one layer take on one device, padding included."""

    def weigh(shape: Shape, dtype: DTypeLike, axes: tuple[str | None, ...]) -> int:
        return device_bytes(placement.shard(spec, shape, axes), dtype, placement.platform)

    return sum(jax.tree.leaves(make_cache(spec, count, page_size, weigh, placement.platform)))


def cache_sizes(
    groups: Sequence[CacheGroup], config: EngineConfig, pages: int | None = None
) -> CacheSizes:
    """Pages or slots of every group for a resolved `config`, null included.

    State slots and window pages have a fixed bound per sequence and are granted in full. `pages`
    go to each full-attention group; None: enough for `max_num_seqs` sequences of `max_model_len`.
    """
    if pages is None:
        pages = config.max_num_seqs * pages_for(config.max_positions, config.page_size) + 1
    return CacheSizes(
        config.page_size,
        tuple(pages if (n := _fixed_count(group, config)) is None else n for group in groups),
    )


def _fixed_count(group: CacheGroup, config: EngineConfig) -> int | None:
    """Pages or slots of a group with a bound per sequence, null included; None: it grows."""
    spec, seqs, page = group.spec, config.max_num_seqs, config.page_size
    if isinstance(spec, StateSpec):
        return seqs * config.tokens_per_decode + config.num_checkpoints + 1
    if not isinstance(spec, WindowSpec):
        return None
    # A sequence holds the pages that its window touches; the chunks in flight are shared by all
    # rows of a step, with one partial page each. When a step runs ahead of the last one's results
    # there are two: pages leave a window when their step is known to be good.
    whole = pages_for(config.max_positions, page)
    reach = spec.window + config.num_speculative_tokens
    window = min(pages_for(reach, page) + 2, whole + 1)
    chunks = 2 if config.run_ahead else 1
    in_flight = min(chunks * pages_for(config.max_num_batched_tokens, page), seqs * whole)
    return seqs * window + in_flight + 1


def plan_caches(
    model: ModelConfig,
    config: EngineConfig,
    dtype: str,
    *,
    budget: int | None = None,
    placement: Placement | None = None,
    row_bytes: Callable[[EngineConfig], int] = lambda config: 0,
) -> CachePlan:
    """Sizes every cache group to fit the budget.

    What does not fit is clamped and logged: full-attention pages first (no fewer than one sequence
    of `max_model_len` needs), then `num_checkpoints`, `max_num_seqs` and `max_model_len`; but only
    what `config` leaves open. The plan's own `config` is resolved and has the values that fit.

    Args:
        model: the model. config: resolved or not; `cache_bytes` comes before `budget`.
        dtype: of the activations.
        budget: bytes on each device; None: a share of what the default device has free.
        placement: where the caches lie; None: on the default device.
        row_bytes: what the budget holds besides the caches, by resolved configuration.

    Raises:
        ValueError: what `config` asks for does not fit; the message says what would.
    """
    if config.cache_bytes:
        budget, row_bytes = config.cache_bytes, lambda config: 0
    if budget is None:
        budget = available_bytes(config.memory_utilization)
    placement = placement or Placement(jax.default_backend())
    groups = model_groups(model, config, dtype)
    return _Fit(model, config, groups, budget, placement, row_bytes).plan()


@dataclass(frozen=True)
class _Fit:
    """The search for the largest limits that fit. Bytes grow with each limit, so it bisects."""

    model: ModelConfig
    config: EngineConfig  # as given
    groups: tuple[CacheGroup, ...]
    budget: int
    placement: Placement
    row_bytes: Callable[[EngineConfig], int]

    def plan(self) -> CachePlan:
        """The largest plan: checkpoints yield before sequences, sequences before their length."""
        wanted = self._resolved()
        seqs, length = wanted.max_num_seqs, wanted.max_model_len
        if wanted.num_checkpoints > 1 and not self.config.num_checkpoints:
            kept = _largest(
                1, wanted.num_checkpoints, lambda n: self._keeping(n)._fits(seqs, length)
            )
            if kept < wanted.num_checkpoints:
                return self._keeping(kept or 1)._plan(wanted)
        return self._plan(wanted)

    def _keeping(self, checkpoints: int) -> "_Fit":
        return replace(self, config=replace(self.config, num_checkpoints=checkpoints))

    def _plan(self, wanted: EngineConfig) -> CachePlan:
        seqs, length = wanted.max_num_seqs, wanted.max_model_len
        if not self._fits(seqs, length) and not self.config.max_num_seqs:
            seqs = _largest(1, seqs, lambda n: self._fits(n, length)) or 1
        if not self._fits(seqs, length) and not self.config.max_model_len:
            length = _largest(SHORTEST, length, lambda n: self._fits(seqs, n)) or length
        if not self._fits(seqs, length):
            raise ValueError(self._refusal(seqs, length))
        config = self._resolved(seqs, length)
        pages = config.num_pages or self._pages(config)
        plan = CachePlan(
            self.groups, cache_sizes(self.groups, config, pages), config, self.placement
        )
        self._log(wanted, plan)
        return plan

    def _resolved(self, seqs: int = 0, length: int = 0) -> EngineConfig:
        limits = {"max_num_seqs": seqs, "max_model_len": length}
        changed = replace(self.config, **{name: value for name, value in limits.items() if value})
        return changed.resolve(self.model)

    def _fits(self, seqs: int, length: int, num_pages: int = 0) -> bool:
        """Whether so many sequences can run, if no more than one of them has full length."""
        config = self._resolved(seqs, length)
        least = pages_for(config.max_positions, config.page_size) + 1
        return self._bytes(config, num_pages or self.config.num_pages or least) <= self.budget

    def _pages(self, config: EngineConfig) -> int:
        """Full-attention pages: what is left, up to full length for every sequence."""
        least = pages_for(config.max_positions, config.page_size) + 1
        most = config.max_num_seqs * (least - 1) + 1
        fits = lambda pages: self._bytes(config, pages) <= self.budget  # noqa: E731
        return most if fits(most) else _largest(least, most, fits)

    def _bytes(self, config: EngineConfig, pages: int) -> int:
        sizes = cache_sizes(self.groups, config, pages)
        plan = CachePlan(self.groups, sizes, config, self.placement)
        return plan.total_bytes + self.row_bytes(config)

    def _log(self, wanted: EngineConfig, plan: CachePlan) -> None:
        limits = [("max_num_seqs", wanted.max_num_seqs, plan.config.max_num_seqs)]
        limits += [("max_model_len", wanted.max_model_len, plan.config.max_model_len)]
        limits += [("num_checkpoints", wanted.num_checkpoints, plan.config.num_checkpoints)]
        if not plan.config.num_pages:
            ample = cache_sizes(self.groups, plan.config)
            counts = zip(ample.counts, plan.sizes.counts, strict=True)
            limits += [("full-attention pages", a, b) for a, b in dict.fromkeys(counts)]
        clamped = [f"{name} from {a:,} to {b:,}" for name, a, b in limits if a != b]
        if clamped:
            room = format_bytes(self.budget)
            logger.warning("clamped %s: %s are free for caches", ", ".join(clamped), room)

    def _refusal(self, seqs: int, length: int) -> str:
        """Why it does not fit, and the largest value of each limit given that would."""
        given = self.config
        wanted = self._resolved(seqs, length)
        least = pages_for(wanted.max_positions, given.page_size) + 1
        needed = self._bytes(wanted, given.num_pages or least)
        asked, fitting = [f"max_num_seqs {seqs:,}", f"max_model_len {length:,}"], []
        few, short = given.max_num_seqs or 1, given.max_model_len or SHORTEST
        if given.max_num_seqs and (n := _largest(1, few, lambda n: self._fits(n, short))):
            fitting.append(f"max_num_seqs {n:,}")
        if given.max_model_len and (n := _largest(SHORTEST, short, lambda n: self._fits(few, n))):
            fitting.append(f"max_model_len {n:,}")
        if given.num_pages:
            asked.append(f"num_pages {given.num_pages:,}")
            if n := _largest(2, given.num_pages, lambda n: self._fits(few, short, n)):
                fitting.append(f"num_pages {n:,}")
        if not fitting and (n := _largest(SHORTEST, length, lambda n: self._fits(1, n))):
            fitting.append(f"max_num_seqs 1 with max_model_len {n:,}")
        remedy = f"at most {' or '.join(fitting)} would fit" if fitting else "not even one fits"
        return (
            f"{', '.join(asked)} need {format_bytes(needed)} of caches but only "
            f"{format_bytes(self.budget)} are free for them; {remedy}"
        )


def _largest(first: int, last: int, fits: Callable[[int], bool]) -> int:
    """The largest value of first..last that fits, if every smaller one fits as well; 0: none."""
    found = 0
    while first <= last:
        middle = (first + last) // 2
        if fits(middle):
            found, first = middle, middle + 1
        else:
            last = middle - 1
    return found


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
