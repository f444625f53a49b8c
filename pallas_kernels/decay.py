"""Attention within a chunk whose scores decay with distance, per head or per key channel."""

import jax
import jax.numpy as jnp

BLOCK = 16  # queries that share a reference point for the decays of earlier keys


def scores(q: jax.Array, k: jax.Array, total: jax.Array) -> jax.Array:
    """f32[H, C, C]: sum_d q_i[d] k_j[d] e^(total_i[d] - total_j[d]) for j <= i, else 0.

    Args:
        q: f32[H, C, dk] queries.
        k: f32[H, C, dk] keys.
        total: f32[H, C, 1 or dk] log decay since the chunk began, summed; it never rises with C.

    No exponent is positive: e^(total_i) e^(-total_j) would overflow where decay is strong.
    """
    if total.shape[-1] == 1:
        decay = total[..., 0]
        return _ratio(decay[:, :, None] - decay[:, None, :]) * jnp.einsum("hid,hjd->hij", q, k)
    size = q.shape[1]
    rows = []
    for start in range(0, size, BLOCK):
        block = slice(start, min(start + BLOCK, size))
        # Of the block's own keys channel by channel; of earlier ones through the block's start.
        ratio = _ratio(total[:, block, None, :] - total[:, None, block, :])
        own = jnp.sum(q[:, block, None, :] * k[:, None, block, :] * ratio, axis=3)
        edge = total[:, max(start - 1, 0), None, :]
        left = q[:, block] * jnp.exp(total[:, block] - edge)
        right = k[:, :start] * jnp.exp(edge - total[:, :start])
        earlier = jnp.einsum("hid,hjd->hij", left, right)
        later = jnp.zeros((*own.shape[:2], size - block.stop), own.dtype)
        rows.append(jnp.concatenate([earlier, own, later], axis=2))
    return jnp.concatenate(rows, axis=1)


def _ratio(difference: jax.Array) -> jax.Array:
    """e^difference [H, i, j, ...] for j <= i, else 0."""
    size = difference.shape[1]
    lower = jnp.tril(jnp.ones((size, size), bool)).reshape(
        1, size, size, *[1] * (difference.ndim - 3)
    )
    # Selected before the exponential: above the diagonal the difference may overflow it.
    return jnp.exp(jnp.where(lower, difference, -jnp.inf))
