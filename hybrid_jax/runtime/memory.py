"""What happens to cache memory between steps: pages copied, rows overwritten, read and written.

Every function works on the caches of one cache group, in place (they are donated), and in time that
depends on the number of ids and not on the size of the pools. Ids come in blocks of `BLOCK`, padded
with the null id, so that each function compiles once per group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.cache.arrays import LayerCache
from hybrid_jax.runtime.batch import Carry
from hybrid_jax.specs import CacheGroup, CacheSpec, StateSpec
from pallas_kernels import registry, rows
from pallas_kernels.paged_attention import pack, unpack
from pallas_kernels.storage import decode, encode

BLOCK = 16  # ids per call
Caches = tuple[LayerCache, ...]


class CarryMemory:
    """The operations on the caches of a carry, compiled for its shapes and shardings."""

    def __init__(self, groups: tuple[CacheGroup, ...], carry: Carry, *, sharded: bool) -> None:
        self._groups = groups
        caches = [self._of_group(carry, g) for g in range(len(groups))]
        jit = partial(_jit, sharded=sharded)
        copy = partial(_copy, sharded=sharded)
        self._copy = [jit(copy, like=group) for group in caches]
        self._fill = [jit(_fill, like=group) for group in caches]
        self._write = [
            jit(partial(_write, spec=group.spec), like=some)
            for group, some in zip(groups, caches, strict=True)
        ]
        self._read = [jax.jit(partial(_read, spec=group.spec)) for group in groups]
        self._states = [g for g, group in enumerate(groups) if isinstance(group.spec, StateSpec)]
        self._set_owner = [jit(_set_owner, like=owners) for owners in carry.owners]
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

    def read(self, carry: Carry, g: int, ids: Sequence[int]) -> dict[str, np.ndarray]:
        """What pages or slots hold: "<layer>.<name>" -> [ids, ...], in the dtype of the values.

        Pages are [ids, G, 2K, H] on every platform, K of head j at row 2j and V at row 2j + 1.
        """
        caches = self._of_group(carry, g)
        blocks = [jax.device_get(self._read[g](caches, block)) for block in _blocks(ids)]
        return {
            name: np.concatenate([block[layer][field] for block in blocks])[: len(ids)]
            for layer, cache in enumerate(caches)
            for name, field in self._names(g, layer, cache)
        }

    def write(
        self,
        carry: Carry,
        g: int,
        ids: Sequence[int],
        arrays: Mapping[str, np.ndarray],
        owner: int,
    ) -> Carry:
        """Undoes `read`. Slots get an owner."""
        start = 0
        for block in _blocks(ids):
            caches = self._of_group(carry, g)
            values = tuple(
                {
                    field: _block_of(arrays[name], start, getattr(cache, field).dtype)
                    for name, field in self._names(g, layer, cache)
                }
                for layer, cache in enumerate(caches)
            )
            carry = self._replace(carry, g, self._write[g](caches, block, values))
            if g in self._states:
                carry = self._own(carry, self._states.index(g), block, owner)
            start += BLOCK
        return carry

    def _own(self, carry: Carry, state: int, slots: np.ndarray, owner: int) -> Carry:
        owners = list(carry.owners)
        owners[state] = self._set_owner[state](owners[state], slots, np.int32(owner))
        return replace(carry, owners=tuple(owners))

    def _names(self, g: int, nth: int, cache: LayerCache) -> list[tuple[str, str]]:
        """Per array of the nth layer of a group: its name in a snapshot, and its field."""
        layer = self._groups[g].layers[nth]
        return [(f"{layer}.{field.name}", field.name) for field in fields(cache)]

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


def _copy(caches: Caches, source: jax.Array, target: jax.Array, *, sharded: bool) -> Caches:
    with registry.partitioned(sharded):
        return jax.tree.map(lambda array: rows.copy_rows(array, source, target), caches)


def _fill(caches: Caches, ids: jax.Array, value: jax.Array) -> Caches:
    def fill(array: jax.Array) -> jax.Array:
        return array.at[ids].set(encode(value, array.dtype))

    return jax.tree.map(fill, caches)


def _read(caches: Caches, ids: jax.Array, *, spec: CacheSpec) -> tuple[dict[str, jax.Array], ...]:
    def read(array: jax.Array) -> jax.Array:
        values = decode(array[ids])
        if isinstance(spec, StateSpec):
            return values
        return unpack(values, spec.num_kv_heads, spec.head_dim)

    return tuple({f.name: read(getattr(cache, f.name)) for f in fields(cache)} for cache in caches)


def _write(
    caches: Caches, ids: jax.Array, values: tuple[dict[str, jax.Array], ...], *, spec: CacheSpec
) -> Caches:
    def write(array: jax.Array, values: jax.Array) -> jax.Array:
        if not isinstance(spec, StateSpec):
            values = pack(values, *array.shape[2:])
        return array.at[ids].set(values)

    return tuple(
        replace(cache, **{name: write(getattr(cache, name), v) for name, v in some.items()})
        for cache, some in zip(caches, values, strict=True)
    )


def _set_owner(owners: jax.Array, slots: jax.Array, owner: jax.Array) -> jax.Array:
    return owners.at[slots].set(jnp.where(slots == 0, 0, owner))


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


def _block_of(values: np.ndarray, start: int, storage: np.dtype) -> np.ndarray:
    """`BLOCK` of the values from `start` on, zeros after the last, as a pool holds them."""
    some = values[start : start + BLOCK]
    block = np.zeros((BLOCK, *values.shape[1:]), storage)
    block[: len(some)] = some.view(storage)
    return block
