"""The call that layers make: checks shapes, selects an implementation, runs it."""

import jax

from pallas_kernels import registry
from pallas_kernels.checks import (
    check_float32,
    check_floating,
    check_groups,
    check_rows,
    check_shapes,
)
from pallas_kernels.gla import reference
from pallas_kernels.ragged import RaggedBatch

OP = "gla"
registry.register(OP, registry.REFERENCE, reference.gla, registry.never)
registry.register_kernel(OP, "mosaic_tpu", "tpu", f"{__package__}.mosaic_tpu:gla")
registry.register_kernel(OP, "triton_gpu", "gpu", f"{__package__}.triton_gpu:gla")
registry.register_kernel(
    OP, "triton_gpu_recurrent", "gpu", f"{__package__}.triton_gpu_recurrent:gla"
)


def gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs gated linear attention over every row of a ragged batch, from slot to slot.

    Per value head: S <- diag(e^g) S + k (x) v;  o = S^T q, in float32. A decay that is the same
    for all tokens of a head is lightning attention or retention.
    A row with earlier tokens starts from `state[read_slots]`, any other from zeros, whatever its
    slot holds. The state after the row's last token goes to `state[write_slots]`; every other slot
    is left as it is. A slot written in this batch must not be read by another row of it.

    Args:
        q: [T, Hk, dk] queries.
        k: [T, Hk, dk] keys; key head j serves value heads [j * Hv / Hk, (j + 1) * Hv / Hk).
        v: [T, Hv, dv] values.
        g: f32[T, Hv] log decay, <= 0; or f32[T, Hv, dk], one per key channel.
        state: f32[slots, Hv, dk, dv]; donate it to the surrounding jit to update it in place.
        ragged: row boundaries.
        read_slots: i32[S] from 0 to slots - 1, which is not checked; 0 (the null slot) for padding
            rows.
        write_slots: i32[S], likewise.
        scale: factor on q; None: dk ** -0.5.
        implementation: a registered name; None: as `registry.forcing` says, or as it chooses.

    Returns:
        out [T, Hv, dv] in the dtype of v (0 for padding tokens), and the new `state`.
    """
    _check(q, k, v, g, state, ragged, read_slots, write_slots)
    facts = registry.Facts.of(
        q=q, k=k, v=v, g=g, state=state, rows=ragged.num_rows_padded,
        decode_only=ragged.decode_only,
    )  # fmt: skip
    run = registry.select(OP, facts, implementation).fn
    return run(q, k, v, g, state, ragged, read_slots, write_slots, scale=scale)


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
) -> None:
    if v.ndim != 3 or q.ndim != 3:
        raise ValueError(f"{OP}: q, k, v must be [T, heads, dim], got q {q.shape}, v {v.shape}")
    num_tokens, v_heads, dv = v.shape
    k_heads, dk = q.shape[1:]
    check_shapes(OP, {
        "q": (q, (num_tokens, k_heads, dk)),
        "k": (k, (num_tokens, k_heads, dk)),
        "g": (g, (num_tokens, v_heads, dk)[: max(2, g.ndim)]),
        "state": (state, (state.shape[0], v_heads, dk, dv)),
    })  # fmt: skip
    check_float32(OP, g=g, state=state)
    check_groups(OP, v_heads, k_heads)
    check_floating(OP, q=q, k=k, v=v)
    check_rows(OP, num_tokens, ragged, read_slots, write_slots)
