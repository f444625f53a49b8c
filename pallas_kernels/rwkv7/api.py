"""The call that layers make: checks shapes, selects an implementation, runs it."""

import jax

from pallas_kernels import registry
from pallas_kernels.checks import check_float32, check_floating, check_rows, check_shapes
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.rwkv7 import reference

OP = "rwkv7"
registry.register(OP, registry.REFERENCE, reference.rwkv7, registry.never)
registry.register_kernel(OP, "mosaic_tpu", "tpu", f"{__package__}.mosaic_tpu:rwkv7")
registry.register_kernel(OP, "triton_gpu", "gpu", f"{__package__}.triton_gpu:rwkv7")


def rwkv7(
    r: jax.Array,
    w: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs a recurrence with diagonal-plus-low-rank transition over every row, from slot to slot.

    Per head: S <- diag(e^w) S + b (x) S^T a + k (x) v;  o = S^T r, in float32. RWKV-7 has
    a = -kappa and b = kappa * (in-context learning rate).
    A row with earlier tokens starts from `state[read_slots]`, any other from zeros, whatever its
    slot holds. The state after the row's last token goes to `state[write_slots]`; every other slot
    is left as it is. A slot written in this batch must not be read by another row of it.

    Args:
        r: [T, H, dk] receptance, the queries.
        w: f32[T, H, dk] log decay, <= 0.
        k: [T, H, dk] keys.
        v: [T, H, dv] values.
        a: [T, H, dk] what is read from the old state,
        b: [T, H, dk] and where it is added.
        state: f32[slots, dk, H * dv]; donate it to the surrounding jit to update it in place.
        ragged: row boundaries.
        read_slots: i32[S] from 0 to slots - 1, which is not checked; 0 (the null slot) for padding
            rows.
        write_slots: i32[S], likewise.
        implementation: a registered name; None: as `registry.forcing` says, or as it chooses.

    Returns:
        out [T, H, dv] in the dtype of v (0 for padding tokens), and the new `state`.
    """
    if v.ndim != 3 or r.ndim != 3:
        raise ValueError(f"{OP}: r and v must be [T, heads, dim], got {r.shape} and {v.shape}")
    num_tokens, heads, dv = v.shape
    keys = num_tokens, heads, r.shape[2]
    expected = {name: (x, keys) for name, x in (("r", r), ("w", w), ("k", k), ("a", a), ("b", b))}
    check_shapes(OP, {**expected, "state": (state, (state.shape[0], keys[2], heads * dv))})
    check_float32(OP, w=w, state=state)
    check_floating(OP, r=r, k=k, v=v, a=a, b=b)
    check_rows(OP, num_tokens, ragged, read_slots, write_slots)
    facts = registry.Facts.of(
        r=r, k=k, v=v, a=a, b=b, state=state, rows=ragged.num_rows_padded,
        decode_only=ragged.decode_only,
    )  # fmt: skip
    run = registry.select(OP, facts, implementation).fn
    return run(r, w, k, v, a, b, state, ragged, read_slots, write_slots)
