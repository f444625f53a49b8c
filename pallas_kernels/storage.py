"""How pools of bfloat16 values are held in memory.

XLA:CPU has no bfloat16 gather or scatter: it converts the whole operand to float32 and back, so a
step would pass over the whole pool several times. On CPU pools therefore hold the bits as uint16,
and only what an op reads or writes is converted. An op accepts both dtypes on every platform.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import platform as platform_


def storage_dtype(dtype: DTypeLike, platform: str | None = None) -> np.dtype:
    """The dtype of a pool of values of `dtype` on `platform` (default: the current one)."""
    platform = platform or platform_.current().platform
    if platform == "cpu" and jnp.dtype(dtype) == jnp.bfloat16:
        return jnp.dtype(jnp.uint16)
    return jnp.dtype(dtype)


def value_dtype(storage: DTypeLike) -> np.dtype:
    """The dtype of the values that a pool of dtype `storage` holds."""
    is_bits = jnp.dtype(storage) == jnp.uint16
    return jnp.dtype(jnp.bfloat16) if is_bits else jnp.dtype(storage)


def encode(values: jax.Array, storage: DTypeLike) -> jax.Array:
    """Values as they are held in a pool of dtype `storage`: rounded to its value dtype."""
    values = values.astype(value_dtype(storage))
    is_bits = values.dtype != jnp.dtype(storage)
    return lax.bitcast_convert_type(values, jnp.dtype(storage)) if is_bits else values


def decode(stored: jax.Array) -> jax.Array:
    """What `encode` was given, up to rounding."""
    dtype = value_dtype(stored.dtype)
    return lax.bitcast_convert_type(stored, dtype) if dtype != stored.dtype else stored
