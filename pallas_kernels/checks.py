"""Checks of operands that every op makes, so that a mistake is named before anything compiles."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.storage import INT8, value_dtype


def check_shapes(op: str, expected: Mapping[str, tuple[jax.Array, tuple[int, ...]]]) -> None:
    """Raises ValueError unless every array has its shape. `expected`: name -> (array, shape)."""
    for name, (array, shape) in expected.items():
        if not hasattr(array, "shape"):
            raise ValueError(f"{op}: {name} must be an array of shape {shape}, got {array!r}")
        if array.shape != shape:
            raise ValueError(f"{op}: {name} must be {shape}, got {array.shape}")


def check_float32(op: str, **arrays: jax.Array) -> None:
    """Raises ValueError unless every array is float32."""
    for name, array in arrays.items():
        if array.dtype != jnp.float32:
            raise ValueError(f"{op}: {name} must be float32, got {array.dtype}")


def check_floating(op: str, **arrays: jax.Array) -> None:
    """Raises ValueError unless every array has a floating-point dtype."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{op}: {name} must be floating point, got {array.dtype}")


def check_pool(op: str, name: str, pool: jax.Array, *, int8: bool = False) -> None:
    """Raises ValueError unless a pool holds floating-point values, or, if it may, int8."""
    dtype = value_dtype(pool.dtype)
    if not (jnp.issubdtype(dtype, jnp.floating) or (int8 and dtype == INT8)):
        kinds = "floating point or int8" if int8 else "floating point"
        raise ValueError(f"{op}: {name} must hold {kinds}, got {pool.dtype}")


def check_int32(op: str, **arrays: jax.Array) -> None:
    """Raises ValueError unless every array is int32."""
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{op}: {name} must be int32, got {array.dtype}")


def check_state(op: str, state: jax.Array) -> None:
    """Raises ValueError unless a pool of states holds float32 or bfloat16."""
    if value_dtype(state.dtype) not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"{op}: state must hold float32 or bfloat16, got {state.dtype}")


def check_rows(
    op: str, num_tokens: int, ragged: RaggedBatch, read_slots: jax.Array, write_slots: jax.Array
) -> None:
    """Raises ValueError unless tokens, rows and slots fit each other.

    The slots themselves are known on the device only: nobody checks their range.
    """
    ragged.check(num_tokens, op)
    rows = (ragged.num_rows_padded,)
    check_shapes(op, {"read_slots": (read_slots, rows), "write_slots": (write_slots, rows)})
    check_int32(op, read_slots=read_slots, write_slots=write_slots)


def check_groups(op: str, v_heads: int, k_heads: int) -> None:
    """Raises ValueError unless every key head serves equally many value heads."""
    if v_heads < 1 or k_heads < 1:
        raise ValueError(
            f"{op}: there must be heads, got {v_heads} value heads and {k_heads} key heads"
        )
    if v_heads % k_heads:
        raise ValueError(f"{op}: {v_heads} value heads are not a multiple of {k_heads} key heads")


def check_dt_limit(op: str, dt_limit: tuple[float, float]) -> None:
    """Raises ValueError unless the bounds of a step size are ordered and not negative."""
    try:
        lowest, highest = dt_limit
        ordered = bool(0 <= lowest <= highest)
    except (TypeError, ValueError):  # no pair, or not one of numbers
        ordered = False
    if not ordered:
        raise ValueError(
            f"{op}: dt_limit must be two numbers, 0 <= lowest <= highest, got {dt_limit!r}"
        )
