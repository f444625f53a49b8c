"""Scales of K and V, one per KV head, around implementations that know none.

A score is linear in K and the output in V: queries times the scale of their K, and the output times
that of its V, are all that it takes. So pages hold what the step divided, and no kernel multiplies.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

F32 = jnp.float32


def run_scaled(
    run: Callable[..., tuple[jax.Array, jax.Array]],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *rest: Any,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """An implementation on pages of K / k_scale and V / v_scale; see `api.paged_attention`.

    K and V stay in float32 until pages round them. Queries and output are rounded to the dtype of q
    once more.
    """
    if k_scale is not None:
        q, k = _times(q, k_scale), k.astype(F32) / k_scale[None, :, None]
    if v_scale is not None:
        v = v.astype(F32) / v_scale[None, :, None]
    out, pages = run(q, k, v, *rest, **options)
    return (out if v_scale is None else _times(out, v_scale)), pages


def _times(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x [T, N, H] by scale [K] of the KV head that a query head reads, in the dtype of x."""
    by_head = jnp.repeat(scale, x.shape[1] // scale.shape[0])
    return (x.astype(F32) * by_head[None, :, None]).astype(x.dtype)
