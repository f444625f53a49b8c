"""The call that layers make: checks shapes, selects an implementation, runs it."""

import jax

from pallas_kernels import registry
from pallas_kernels.checks import check_float32, check_floating, check_rows, check_shapes
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.selective_scan import reference

OP = "selective_scan"
registry.register(OP, registry.REFERENCE, reference.selective_scan, registry.never)
registry.register_kernel(OP, "mosaic_tpu", "tpu", f"{__package__}.mosaic_tpu:selective_scan")
registry.register_kernel(OP, "triton_gpu", "gpu", f"{__package__}.triton_gpu:selective_scan")


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None,
    dt_bias: jax.Array | None,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs Mamba-1's recurrence over every row of a ragged batch, from slot to slot.

    Per channel, with dt = softplus(dt + dt_bias):
    S <- e^(dt A) S + B dt x;  y = S . C + D x, in float32.
    A row with earlier tokens starts from `state[read_slots]`, any other from zeros, whatever its
    slot holds. The state after the row's last token goes to `state[write_slots]`; every other slot
    is left as it is. A slot written in this batch must not be read by another row of it.

    Args:
        x: [T, E] inputs.
        dt: [T, E] step sizes before bias and softplus.
        A: f32[N, E], < 0: transposed, as the state is.
        B: [T, N] input weights.
        C: [T, N] output weights.
        D: f32[E] weight of the skip, or None.
        dt_bias: f32[E] or None.
        state: f32[slots, N, E]; donate it to the surrounding jit to update it in place.
        ragged: row boundaries.
        read_slots: i32[S] from 0 to slots - 1, which is not checked; 0 (the null slot) for padding
            rows.
        write_slots: i32[S], likewise.
        implementation: a registered name; None: as `registry.forcing` says, or as it chooses.

    Returns:
        y [T, E] in the dtype of x (0 for padding tokens), and the new `state`.
    """
    if x.ndim != 2 or A.ndim != 2:
        raise ValueError(f"{OP}: x must be [T, E] and A [N, E], got {x.shape} and {A.shape}")
    num_tokens, channels = x.shape
    size = A.shape[0]
    check_shapes(OP, {
        "dt": (dt, x.shape),
        "A": (A, (size, channels)),
        "B": (B, (num_tokens, size)),
        "C": (C, (num_tokens, size)),
        "state": (state, (state.shape[0], size, channels)),
        **{n: (p, (channels,)) for n, p in (("D", D), ("dt_bias", dt_bias)) if p is not None},
    })  # fmt: skip
    check_float32(OP, A=A, state=state)
    check_floating(OP, x=x, dt=dt, B=B, C=C)
    check_rows(OP, num_tokens, ragged, read_slots, write_slots)
    facts = registry.Facts.of(
        x=x, dt=dt, B=B, C=C, state=state, rows=ragged.num_rows_padded,
        decode_only=ragged.decode_only,
    )  # fmt: skip
    run = registry.select(OP, facts, implementation).fn
    return run(x, dt, A, B, C, D, dt_bias, state, ragged, read_slots, write_slots)
