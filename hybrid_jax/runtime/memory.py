"""What happens to cache memory between steps: pages copied, rows overwritten, read and written.

Every function works on the caches of one cache group, in place (they are donated), and in time that
depends on the number of ids and not on the size of the pools. Ids come in blocks of `BLOCK`, padded
with the null id, so that each function compiles once per group.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from hybrid_jax.cache.arrays import LayerCache
from hybrid_jax.runtime.batch import Carry
from hybrid_jax.specs import CacheGroup
from pallas_kernels.storage import encode

BLOCK = 16  # ids per call
Caches = tuple[LayerCache, ...]


class CarryMemory:
    """The operations on the caches of a carry, compiled for its shapes and shardings."""

    def __init__(self, groups: tuple[CacheGroup, ...], carry: Carry, *, sharded: bool) -> None:
        self._groups = groups
        caches = [self._of_group(carry, g) for g in range(len(groups))]
        jit = partial(_jit, sharded=sharded)
        self._copy = [jit(_copy, like=group) for group in caches]
        self._fill = [jit(_fill, like=group) for group in caches]
        self._set_history = jit(_set_history, like=carry.history)

    def copy(self, carry: Carry, g: int, source: Sequence[int], target: Sequence[int]) -> Carry:
        """Page source[i] of group `g` becomes page target[i]. Targets differ from all sources."""
        for from_, to in zip(_blocks(source), _blocks(target), strict=True):
            carry = self._replace(carry, g, self._copy[g](self._of_group(carry, g), from_, to))
        return carry

    def fill(self, carry: Carry, g: int, ids: Sequence[int], value: float) -> Carry:
        """Pages or slots hold nothing but `value`."""
        for block in _blocks(ids):
            caches = self._fill[g](self._of_group(carry, g), block, np.float32(value))
            carry = self._replace(carry, g, caches)
        return carry

    def set_history(self, carry: Carry, row: int, token_ids: Sequence[int]) -> Carry:
        """The first tokens of a persistent row; what follows them is meaningless."""
        tokens = np.zeros(carry.history.shape[1], np.int32)
        tokens[: len(token_ids)] = token_ids
        return replace(carry, history=self._set_history(carry.history, np.int32(row), tokens))

    def _of_group(self, carry: Carry, g: int) -> Caches:
        return tuple(carry.caches[layer] for layer in self._groups[g].layers)

    def _replace(self, carry: Carry, g: int, caches: Caches) -> Carry:
        everything = list(carry.caches)
        for layer, cache in zip(self._groups[g].layers, caches, strict=True):
            everything[layer] = cache
        return replace(carry, caches=tuple(everything))


def _copy(caches: Caches, source: jax.Array, target: jax.Array) -> Caches:
    return jax.tree.map(lambda array: array.at[target].set(array[source]), caches)


def _fill(caches: Caches, ids: jax.Array, value: jax.Array) -> Caches:
    def fill(array: jax.Array) -> jax.Array:
        return array.at[ids].set(encode(value, array.dtype))

    return jax.tree.map(fill, caches)


def _set_history(history: jax.Array, row: jax.Array, tokens: jax.Array) -> jax.Array:
    return history.at[row].set(tokens)


def _jit(function: Callable[..., Any], *, like: Any, sharded: bool) -> Callable[..., Any]:
    """Compiles a function that changes its first argument, which looks like `like`, in place."""
    options: dict[str, Any] = {}
    if sharded:
        options["out_shardings"] = jax.tree.map(lambda array: array.sharding, like)
    return jax.jit(function, donate_argnums=0, **options)


def _blocks(ids: Sequence[int]) -> Iterator[np.ndarray]:
    """The ids in arrays i32[BLOCK], padded with the null id."""
    for start in range(0, len(ids), BLOCK):
        block = np.zeros(BLOCK, np.int32)
        some = ids[start : start + BLOCK]
        block[: len(some)] = some
        yield block
