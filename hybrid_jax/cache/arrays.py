"""Caches on the device: one pytree per layer, plain arguments and results of the step."""

from dataclasses import dataclass

import jax

from hybrid_jax.specs import CacheGroup, CacheSpec, StateSpec
from pallas_kernels import paged_attention
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

    conv: jax.Array  # [slots, W - 1, channels] last inputs of the causal convolution
    recurrent: jax.Array  # f32[slots, Hv, dk, dv]


LayerCache = PagedCache | StateCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateSlots:
    """Where each row's state is read from and written to, in one state cache group.

    Padding rows point at slot 0, the null slot. Owners are sequence uids (> 0; 0 is nobody's).
    """

    read: jax.Array  # i32[S]
    write: jax.Array  # i32[S]
    read_owner: jax.Array  # i32[S] who must own `read` when the row has earlier tokens
    write_owner: jax.Array  # i32[S] who owns `write` after the step


@dataclass(frozen=True)
class CacheSizes:
    """How many pages or slots each cache group gets, null page and null slot included."""

    page_size: int
    counts: tuple[int, ...]  # per cache group: pages P, or slots


def cache_shapes(spec: CacheSpec, count: int, page_size: int) -> LayerCache:
    """The arrays of one layer as a `LayerCache` of `jax.ShapeDtypeStruct`."""
    if isinstance(spec, StateSpec):
        arrays = {
            a.name: jax.ShapeDtypeStruct((count, *a.shape), storage_dtype(a.dtype))
            for a in spec.arrays
        }
        return StateCache(**arrays)
    shape = paged_attention.pages_shape(count, page_size, spec.num_kv_heads, spec.head_dim)
    return PagedCache(jax.ShapeDtypeStruct(shape, storage_dtype(spec.dtype)))


def cache_axes(spec: CacheSpec) -> LayerCache:
    """Logical axis names of the arrays of one layer, in the shape of `cache_shapes`."""
    if isinstance(spec, StateSpec):
        # The convolution's channels are q|k|v of all heads: cutting them by head would interleave
        # three different cuts, so the small array is replicated.
        return StateCache(conv=(None, None, None), recurrent=(None, "value_heads", None, None))
    return PagedCache((None, None, "kv_heads", None))


def layer_specs(groups: tuple[CacheGroup, ...]) -> list[tuple[int, CacheSpec]]:
    """Per layer, in layer order: its cache group's index and spec."""
    by_layer = {i: (g, group.spec) for g, group in enumerate(groups) for i in group.layers}
    return [by_layer[i] for i in sorted(by_layer)]
