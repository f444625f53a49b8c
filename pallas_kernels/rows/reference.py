"""Copying and clearing rows in plain JAX: a gather and a scatter, in place in a donated pool."""

import jax
import jax.numpy as jnp


def write(pool: jax.Array, sources: jax.Array | None, targets: jax.Array) -> jax.Array:
    """See `api.copy_rows`, and without sources `api.clear_rows`."""
    # The null row is moved out of range.
    written = jnp.where(targets == 0, pool.shape[0], targets)
    values = jnp.zeros((), pool.dtype) if sources is None else pool[sources]
    return pool.at[written].set(values, mode="drop")
