"""How pools of bfloat16, float8 and int8 values are held in memory.

XLA:CPU has no bfloat16 gather or scatter: it converts the whole operand to float32 and back, so a
step would pass over the whole pool several times. On CPU pools therefore hold the bits as uint16
(of float8_e4m3fn as uint8), and only what an op reads or writes is converted. An op accepts both
dtypes on every platform. int8 is held as it is everywhere.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import platform as platform_

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
INT8 = jnp.dtype(jnp.int8)
LARGEST = {FLOAT8: 448.0, INT8: 127.0}  # values of the dtypes that saturate
_BITS_OF = {jnp.dtype(jnp.bfloat16): jnp.dtype(jnp.uint16), FLOAT8: jnp.dtype(jnp.uint8)}
_VALUES_OF = {bits: values for values, bits in _BITS_OF.items()}


def storage_dtype(dtype: DTypeLike, platform: str | None = None) -> np.dtype:
    """The dtype of a pool of values of `dtype` on `platform` (default: the current one)."""
    platform = platform or platform_.current().platform
    dtype = jnp.dtype(dtype)
    return _BITS_OF.get(dtype, dtype) if platform == "cpu" else dtype


def value_dtype(storage: DTypeLike) -> np.dtype:
    """The dtype of the values that a pool of dtype `storage` holds."""
    storage = jnp.dtype(storage)
    return _VALUES_OF.get(storage, storage)


def encode(values: jax.Array, storage: DTypeLike) -> jax.Array:
    """Values as they are held in a pool of dtype `storage`: rounded to its value dtype.

    float8_e4m3fn has no infinity and would turn everything from 480 on into NaN; it gets the
    largest value that it has instead, and so does int8, from -127 to 127. There NaN becomes 0.
    """
    dtype = value_dtype(storage)
    if dtype == INT8:  # Triton has no other rounding than floor
        values = jnp.floor(values.astype(jnp.float32) + 0.5)
    if dtype in LARGEST:
        values = jnp.clip(values, -LARGEST[dtype], LARGEST[dtype])
    values = values.astype(dtype)
    is_bits = values.dtype != jnp.dtype(storage)
    return lax.bitcast_convert_type(values, jnp.dtype(storage)) if is_bits else values


def decode(stored: jax.Array) -> jax.Array:
    """What `encode` was given, up to rounding."""
    dtype = value_dtype(stored.dtype)
    return lax.bitcast_convert_type(stored, dtype) if dtype != stored.dtype else stored
