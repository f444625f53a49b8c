"""The call that layers make: checks shapes, selects an implementation, runs it."""

import jax

from pallas_kernels import registry
from pallas_kernels.checks import (
    check_dt_limit,
    check_float32,
    check_floating,
    check_groups,
    check_rows,
    check_shapes,
)
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.ssd import reference

OP = "ssd"
registry.register(OP, registry.REFERENCE, reference.ssd, registry.never)
registry.register_kernel(OP, "mosaic_tpu", "tpu", f"{__package__}.mosaic_tpu:ssd")
registry.register_kernel(OP, "triton_gpu", "gpu", f"{__package__}.triton_gpu:ssd")
registry.register_kernel(
    OP, "triton_gpu_recurrent", "gpu", f"{__package__}.triton_gpu_recurrent:ssd"
)


def ssd(
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
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs Mamba-2's recurrence over every row of a ragged batch, from slot to slot.

    Per head, with dt = clamp(softplus(dt + dt_bias)):
    S <- e^(dt A) S + B (x) dt x;  y = S^T C + D x, in float32.
    A row with earlier tokens starts from `state[read_slots]`, any other from zeros, whatever its
    slot holds. The state after the row's last token goes to `state[write_slots]`; every other slot
    is left as it is. A slot written in this batch must not be read by another row of it.

    Args:
        x: [T, H, P] inputs.
        dt: [T, H] step sizes before bias and softplus.
        A: f32[H], < 0.
        B: [T, G, N] input weights; group j serves heads [j * H / G, (j + 1) * H / G).
        C: [T, G, N] output weights.
        D: f32[H] weight of the skip, or None.
        dt_bias: f32[H] or None.
        state: f32[slots, N, H * P]; donate it to the surrounding jit to update it in place.
        ragged: row boundaries.
        read_slots: i32[S] from 0 to slots - 1, which is not checked; 0 (the null slot) for padding
            rows.
        write_slots: i32[S], likewise.
        dt_limit: lowest and highest dt after the softplus.
        implementation: a registered name; None: as `registry.forcing` says, or as it chooses.

    Returns:
        y [T, H, P] in the dtype of x (0 for padding tokens), and the new `state`.
    """
    _check(x, dt, A, B, C, D, dt_bias, state, ragged, read_slots, write_slots, dt_limit)
    facts = registry.Facts.of(
        x=x, dt=dt, B=B, C=C, state=state, rows=ragged.num_rows_padded,
        decode_only=ragged.decode_only,
    )  # fmt: skip
    run = registry.select(OP, facts, implementation).fn
    return run(
        x, dt, A, B, C, D, dt_bias, state, ragged, read_slots, write_slots, dt_limit=dt_limit
    )


def _check(
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
    dt_limit: tuple[float, float],
) -> None:
    if x.ndim != 3 or B.ndim != 3:
        raise ValueError(f"{OP}: x must be [T, H, P] and B [T, G, N], got {x.shape} and {B.shape}")
    num_tokens, heads, width = x.shape
    groups, size = B.shape[1:]
    check_shapes(OP, {
        "dt": (dt, (num_tokens, heads)),
        "A": (A, (heads,)),
        "B": (B, (num_tokens, groups, size)),
        "C": (C, B.shape),
        "state": (state, (state.shape[0], size, heads * width)),
        **{n: (p, (heads,)) for n, p in (("D", D), ("dt_bias", dt_bias)) if p is not None},
    })  # fmt: skip
    check_float32(OP, A=A, state=state)
    check_groups(OP, heads, groups)
    check_dt_limit(OP, dt_limit)
    check_floating(OP, x=x, dt=dt, B=B, C=C)
    check_rows(OP, num_tokens, ragged, read_slots, write_slots)
