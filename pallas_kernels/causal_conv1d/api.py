"""The call that layers make: checks shapes, selects an implementation, runs it."""

from typing import Literal

import jax

from pallas_kernels import registry
from pallas_kernels.causal_conv1d import reference
from pallas_kernels.checks import check_rows, check_shapes
from pallas_kernels.ragged import RaggedBatch

OP = "causal_conv1d"
registry.register(OP, registry.REFERENCE, reference.causal_conv1d, registry.never)
registry.register_kernel(OP, "triton_gpu", "gpu", f"{__package__}.triton_gpu:causal_conv1d")


def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    activation: Literal["silu"] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """y[t] = activation(sum_j weight[:, j] x[t - W + 1 + j] + bias), per row of a ragged batch.

    Inputs before this step come from `state[read_slots]`; a row without earlier tokens has zeros
    there, whatever its slot holds. The last W - 1 inputs of each row go to `state[write_slots]`;
    every other slot is left as it is. A slot written in this batch must not be read by another row.

    Args:
        x: [T, C] inputs of all rows.
        weight: [C, W]; the last tap multiplies the current token. W >= 2.
        bias: [C] or None.
        state: [slots, W - 1, C] last inputs, oldest first, zeros where the sequence is shorter;
            dtype `storage.storage_dtype` of what the values shall be rounded to. Donate it to the
            surrounding jit to update it in place.
        ragged: row boundaries.
        read_slots: i32[S], 0 (the null slot) for padding rows.
        write_slots: i32[S], 0 for padding rows.
        activation: "silu" or None.
        implementation: a registered name; None: as `registry.forcing` says, or as it chooses.

    Returns:
        y [T, C] in the dtype of x (0 for padding tokens; summed in float32), and the new `state`.
    """
    _check(x, weight, bias, state, ragged, read_slots, write_slots, activation)
    facts = registry.Facts.of(
        x=x, weight=weight, bias=bias is not None, state=state, rows=ragged.num_rows_padded,
        decode_only=ragged.decode_only, activation=activation,
    )  # fmt: skip
    run = registry.select(OP, facts, implementation).fn
    return run(x, weight, bias, state, ragged, read_slots, write_slots, activation=activation)


def _check(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    activation: str | None,
) -> None:
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[1] < 2:
        raise ValueError(
            f"{OP}: x must be [T, C] and weight [C, W >= 2], got {x.shape} and {weight.shape}"
        )
    num_tokens, channels = x.shape
    expected = {
        "weight": (weight, (channels, weight.shape[1])),
        "state": (state, (state.shape[0], weight.shape[1] - 1, channels)),
    }
    if bias is not None:
        expected["bias"] = (bias, (channels,))
    check_shapes(OP, expected)
    if activation not in ("silu", None):
        raise ValueError(f"{OP}: activation must be 'silu' or None, got {activation!r}")
    check_rows(OP, num_tokens, ragged, read_slots, write_slots)
