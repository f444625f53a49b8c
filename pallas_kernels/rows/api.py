"""The calls that caches make: check shapes, select an implementation, run it."""

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.rows import reference

OP = "rows"
registry.register(OP, registry.REFERENCE, reference.write, registry.never)
registry.register_kernel(OP, "mosaic_tpu", "tpu", f"{__package__}.mosaic_tpu:write")


def copy_rows(
    pool: jax.Array,
    sources: jax.Array,
    targets: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Copies row `sources[i]` of a pool to row `targets[i]`, for every i; other rows stay.

    A row that is written must not be read by another pair, nor be written twice. Pairs with target
    0, the null row, do nothing: they pad the list.

    Args:
        pool: [N, ...] slots or pages; donate it to the surrounding jit to update it in place.
        sources: i32[n] rows to read, from 0 to N - 1, which is not checked.
        targets: i32[n] rows to write, likewise; 0 for padding.
        implementation: a registered name; None: as `registry.forcing` says, or as it chooses.
    """
    return _write(pool, sources, targets, implementation)


def clear_rows(pool: jax.Array, rows: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Writes zeros to some rows of a pool; other rows stay. Row 0, the null row, is never written.

    Args:
        pool: [N, ...] slots or pages; donate it to the surrounding jit to update it in place.
        rows: i32[n] rows to clear, from 0 to N - 1, which is not checked; 0 for padding.
        implementation: a registered name; None: as `registry.forcing` says, or as it chooses.
    """
    return _write(pool, None, rows, implementation)


def _write(
    pool: jax.Array, sources: jax.Array | None, targets: jax.Array, implementation: str | None
) -> jax.Array:
    if pool.ndim < 2:
        raise ValueError(f"{OP}: pool must be [N, ...], got {pool.shape}")
    lists = (targets,) if sources is None else (sources, targets)
    for rows in lists:
        if rows.ndim != 1 or rows.shape != targets.shape or rows.dtype != jnp.int32:
            got = " and ".join(f"{x.dtype}{list(x.shape)}" for x in lists)
            raise ValueError(f"{OP}: rows must be lists of int32 of one length, got {got}")
    facts = registry.Facts.of(pool=pool, rows=targets, clear=sources is None)
    return registry.select(OP, facts, implementation).fn(pool, sources, targets)
