"""The call that layers make: checks shapes, selects an implementation, runs it."""

import jax

from pallas_kernels import registry
from pallas_kernels.causal_conv1d import state_shape
from pallas_kernels.checks import (
    check_float32,
    check_floating,
    check_groups,
    check_rows,
    check_shapes,
    check_state,
)
from pallas_kernels.gated_delta_net import reference
from pallas_kernels.gated_delta_net.operands import States, Weights
from pallas_kernels.ragged import RaggedBatch

OP = "gated_delta_net"
registry.register(OP, registry.REFERENCE, reference.gated_delta_net, registry.never, composed=True)
registry.register_kernel(
    OP, "mosaic_tpu", "tpu", f"{__package__}.mosaic_tpu:gated_delta_net",
    fuses=("causal_conv1d", "gated_delta_rule"),
)  # fmt: skip


def gated_delta_net(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    state: States,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    weights: Weights,
    k_heads: int,
    allow_neg_eigval: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, States]:
    """Runs a gated delta net over every row of a ragged batch, from slot to slot.

    Channels go through `causal_conv1d` with silu and are cut into q, k and v; `reference.gates`
    gives g and beta; `gated_delta_rule` makes of them the output. A row with earlier tokens starts
    from `read_slots` of both pools, any other from zeros, whatever its slot holds. What the next
    token needs goes to `write_slots`; every other slot is left as it is. A slot written in this
    batch must not be read by another row of it.

    Args:
        qkv: [T, C] projected channels before the convolution: q of all key heads, k of all key
            heads, v of all value heads. C = 2 Hk dk + Hv dv.
        a: [T, Hv], or [T, Hv, dk] for a decay per key channel (Kimi delta attention).
        b: [T, Hv].
        state: the pools, see `States`: dtype `storage.storage_dtype` of that of qkv for the
            convolution, and of float32 or bfloat16 for the recurrence.
        ragged: row boundaries.
        read_slots: i32[S] from 0 to slots - 1, which is not checked; 0 (the null slot) for padding
            rows.
        write_slots: i32[S], likewise.
        weights: of the layer, see `Weights`.
        k_heads: Hk; key head j serves value heads [j * Hv / Hk, (j + 1) * Hv / Hk).
        allow_neg_eigval: beta is doubled.
        implementation: a registered name; None: as `registry.forcing` says, or as it chooses.

    Returns:
        out [T, Hv, dv] in the dtype of qkv (0 for padding tokens), and the new `state`.
    """
    _check(qkv, a, b, state, ragged, read_slots, write_slots, weights, k_heads)
    facts = registry.Facts.of(
        qkv=qkv, a=a, b=b, conv_weight=weights.conv, conv_bias=weights.conv_bias is not None,
        conv_state=state.conv, state=state.recurrent, rows=ragged.num_rows_padded,
        decode_only=ragged.decode_only, k_heads=k_heads,
    )  # fmt: skip
    run = registry.select(OP, facts, implementation).fn
    return run(
        qkv, a, b, state, ragged, read_slots, write_slots,
        weights=weights, k_heads=k_heads, allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip


def _check(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    state: States,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    weights: Weights,
    k_heads: int,
) -> None:
    if qkv.ndim != 2 or weights.conv.ndim != 2 or state.recurrent.ndim != 4:
        raise ValueError(
            f"{OP}: qkv must be [T, C], weights.conv [C, W] and state.recurrent [slots, Hv, dk, "
            f"dv], got {qkv.shape}, {weights.conv.shape} and {state.recurrent.shape}"
        )
    num_tokens = qkv.shape[0]
    slots, v_heads, dk, dv = state.recurrent.shape
    channels, width = 2 * k_heads * dk + v_heads * dv, weights.conv.shape[1]
    check_groups(OP, v_heads, k_heads)
    decays = (v_heads, dk)[: max(1, a.ndim - 1)]
    expected: dict[str, tuple[jax.Array, tuple[int, ...]]] = {
        "qkv": (qkv, (num_tokens, channels)),
        "a": (a, (num_tokens, *decays)),
        "b": (b, (num_tokens, v_heads)),
        "weights.conv": (weights.conv, (channels, width)),
        "weights.A_log": (weights.A_log, (v_heads,)),
        "weights.dt_bias": (weights.dt_bias, decays),
        "state.conv": (state.conv, state_shape(slots, width - 1, channels)),
    }
    if weights.conv_bias is not None:
        expected["weights.conv_bias"] = (weights.conv_bias, (channels,))
    check_shapes(OP, expected)
    check_float32(OP, **{"weights.A_log": weights.A_log, "weights.dt_bias": weights.dt_bias})
    check_state(OP, state.recurrent)
    check_floating(OP, qkv=qkv, a=a, b=b)
    check_rows(OP, num_tokens, ragged, read_slots, write_slots)
