"""Caches on the device: one pytree per layer, plain arguments and results of the step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike

from hybrid_jax.specs import CacheGroup, CacheSpec, StateSpec
from pallas_kernels import causal_conv1d, paged_attention
from pallas_kernels.storage import storage_dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """K/V pages of one attention layer, full or window. The layout belongs to the kernels."""

    pages: jax.Array  # paged_attention.pages_shape(...)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateCache:
    """State rows of one linear-attention layer."""

    conv: jax.Array  # last inputs of the convolution, causal_conv1d.state_shape(...)
    recurrent: jax.Array  # [slots, Hv, dk, dv]


LayerCache = PagedCache | StateCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateSlots:
    """Where each row's state is read from and written to, in one state cache group.

    Padding rows point at slot 0, the null slot. Owners are sequence uids (> 0; 0 is nobody's).
    """

    read: jax.Array  # i32[S]
    write: jax.Array  # i32[S]; in a VERIFY step i32[S, T / S]: one per token
    read_owner: jax.Array  # i32[S] who must own `read` when the row has earlier tokens
    write_owner: jax.Array  # i32[S] who owns `write` after the step


@dataclass(frozen=True)
class CacheSizes:
    """How many pages or slots each cache group gets, null page and null slot included."""

    page_size: int
    counts: tuple[int, ...]  # per cache group: pages P, or slots


MakeArray = Callable[[tuple[int, ...], DTypeLike, tuple[str | None, ...]], Any]
"""(shape, dtype, one logical axis name per dimension) -> array, or whatever stands for it."""


def make_cache(
    spec: CacheSpec, count: int, page_size: int, make: MakeArray, platform: str | None = None
) -> LayerCache:
    """The arrays of one layer, `count` pages or slots, each made by `make`.

    Pages have the layout of `platform`; None: of the current one.
    """
    if isinstance(spec, StateSpec):
        conv, recurrent = spec.arrays
        conv_shape = causal_conv1d.state_shape(count, *conv.shape)
        return StateCache(
            # The convolution's channels are q|k|v of all heads: cutting them by head would
            # interleave three different cuts, so the small array is replicated.
            conv=make(conv_shape, storage_dtype(conv.dtype), (None,) * len(conv_shape)),
            recurrent=make(
                (count, *recurrent.shape),
                storage_dtype(recurrent.dtype),
                (None, "value_heads", None, None),
            ),
        )
    shape = paged_attention.pages_shape(
        count, page_size, spec.num_kv_heads, spec.head_dim, platform
    )
    return PagedCache(make(shape, storage_dtype(spec.dtype), (None, None, "kv_heads", None)))


def layer_specs(groups: tuple[CacheGroup, ...]) -> list[tuple[int, CacheSpec]]:
    """Per layer, in layer order: its cache group's index and spec."""
    by_layer = {i: (g, group.spec) for g, group in enumerate(groups) for i in group.layers}
    return [by_layer[i] for i in sorted(by_layer)]
