"""The call that layers make: checks shapes, selects an implementation, runs it."""

import jax

from pallas_kernels import registry
from pallas_kernels.causal_conv1d import state_shape
from pallas_kernels.checks import (
    check_dt_limit,
    check_float32,
    check_floating,
    check_groups,
    check_pool,
    check_rows,
    check_shapes,
)
from pallas_kernels.mamba2 import reference
from pallas_kernels.mamba2.operands import States, Weights
from pallas_kernels.ragged import RaggedBatch

OP = "mamba2"
registry.register(OP, registry.REFERENCE, reference.mamba2, registry.never, composed=True)
registry.register_kernel(
    OP, "mosaic_tpu", "tpu", f"{__package__}.mosaic_tpu:mamba2", fuses=("causal_conv1d", "ssd")
)


def mamba2(
    xBC: jax.Array,
    dt: jax.Array,
    state: States,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    weights: Weights,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    implementation: str | None = None,
) -> tuple[jax.Array, States]:
    """Runs a Mamba-2 mixer, from projection to norm, over every row of a ragged batch.

    Channels go through `causal_conv1d` with silu and are cut into x, B and C, of which `ssd` makes
    the output with A = -exp(A_log). A row with earlier tokens starts from `read_slots` of both
    pools, any other from zeros, whatever its slot holds. What the next token needs goes to
    `write_slots`; every other slot is left as it is. A slot written in this batch must not be read
    by another row of it.

    Args:
        xBC: [T, C] projected channels before the convolution: x of all heads, B of all groups, C of
            all groups. C = H P + 2 G N; group j serves heads [j * H / G, (j + 1) * H / G).
        dt: [T, H] step sizes before bias and softplus.
        state: the pools, see `States`: dtype `storage.storage_dtype` of that of xBC for the
            convolution, float32 for the recurrence.
        ragged: row boundaries.
        read_slots: i32[S] from 0 to slots - 1, which is not checked; 0 (the null slot) for padding
            rows.
        write_slots: i32[S], likewise.
        weights: of the layer, see `Weights`.
        dt_limit: lowest and highest dt after the softplus.
        implementation: a registered name; None: as `registry.forcing` says, or as it chooses.

    Returns:
        y [T, H * P] in the dtype of xBC (0 for padding tokens), and the new `state`.
    """
    _check(xBC, dt, state, ragged, read_slots, write_slots, weights, dt_limit)
    facts = registry.Facts.of(
        xBC=xBC, dt=dt, conv_weight=weights.conv, conv_bias=weights.conv_bias is not None,
        conv_state=state.conv, state=state.recurrent, rows=ragged.num_rows_padded,
        decode_only=ragged.decode_only,
    )  # fmt: skip
    run = registry.select(OP, facts, implementation).fn
    return run(xBC, dt, state, ragged, read_slots, write_slots, weights=weights, dt_limit=dt_limit)


def _check(
    xBC: jax.Array,
    dt: jax.Array,
    state: States,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    weights: Weights,
    dt_limit: tuple[float, float],
) -> None:
    if (xBC.ndim, dt.ndim, weights.conv.ndim, state.recurrent.ndim) != (2, 2, 2, 3):
        raise ValueError(
            f"{OP}: xBC must be [T, C], dt [T, H], weights.conv [C, W] and state.recurrent "
            f"[slots, N, H * P], got {xBC.shape}, {dt.shape}, {weights.conv.shape} and "
            f"{state.recurrent.shape}"
        )
    (num_tokens, channels), heads = xBC.shape, dt.shape[1]
    slots, size, inner = state.recurrent.shape
    groups = (channels - inner) // (2 * size) if size else 0
    if not heads or inner % heads or groups < 1 or channels != inner + 2 * groups * size:
        raise ValueError(
            f"{OP}: the channels must be H P + 2 G N, each 1 or more, got {channels} of them with "
            f"{heads} heads and state.recurrent {state.recurrent.shape}"
        )
    check_groups(OP, heads, groups)
    per_head = {f"weights.{name}": getattr(weights, name) for name in ("A_log", "D", "dt_bias")}
    expected: dict[str, tuple[jax.Array, tuple[int, ...]]] = {
        "dt": (dt, (num_tokens, heads)),
        "weights.conv": (weights.conv, (channels, weights.conv.shape[1])),
        "state.conv": (state.conv, state_shape(slots, weights.conv.shape[1] - 1, channels)),
        **{name: (x, (heads,)) for name, x in per_head.items()},
    }
    if weights.conv_bias is not None:
        expected["weights.conv_bias"] = (weights.conv_bias, (channels,))
    check_shapes(OP, expected)
    check_float32(OP, **per_head, **{"state.recurrent": state.recurrent})
    check_dt_limit(OP, dt_limit)
    check_floating(OP, xBC=xBC, dt=dt)
    check_pool(OP, "state.conv", state.conv)
    check_rows(OP, num_tokens, ragged, read_slots, write_slots)
