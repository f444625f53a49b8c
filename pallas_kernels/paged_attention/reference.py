"""Paged attention in plain JAX: the definition of correct, and the path on CPU."""

import jax

from pallas_kernels.ragged import RaggedBatch


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    ragged: RaggedBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.paged_attention`."""
    raise NotImplementedError
