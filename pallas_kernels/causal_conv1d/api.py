"""The call that layers make: checks shapes, selects an implementation, runs it."""

import math
from typing import Literal

import jax

from pallas_kernels import registry
from pallas_kernels.causal_conv1d import reference
from pallas_kernels.checks import check_floating, check_pool, check_rows, check_shapes
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_chip import LANES

OP = "causal_conv1d"
registry.register(OP, registry.REFERENCE, reference.causal_conv1d, registry.never)
registry.register_kernel(OP, "mosaic_tpu", "tpu", f"{__package__}.mosaic_tpu:causal_conv1d")
registry.register_kernel(OP, "triton_gpu", "gpu", f"{__package__}.triton_gpu:causal_conv1d")


def state_shape(slots: int, keep: int, channels: int) -> tuple[int, ...]:
    """Shape of a pool of the last `keep` = W - 1 inputs: [slots, keep, C / n, n].

    n is 128 if it divides C, else C. TPUs tile the last two dimensions: so a tile holds channels of
    one input, and nothing is padded to 8 inputs or moved when one slot is read.
    """
    lanes = LANES if channels % LANES == 0 else channels
    return slots, keep, channels // lanes, lanes


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
        state: [slots, W - 1, C] last inputs, oldest first, zeros where the sequence is shorter; the
            channels may be cut into several dimensions, as by `state_shape`. dtype
            `storage.storage_dtype` of what the values shall be rounded to. Donate it to the
            surrounding jit to update it in place.
        ragged: row boundaries.
        read_slots: i32[S] from 0 to slots - 1, which is not checked; 0 (the null slot) for padding
            rows.
        write_slots: i32[S], likewise.
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
    keep = weight.shape[1] - 1
    cut = state.shape[2:] if math.prod(state.shape[2:]) == channels else (channels,)
    expected: dict[str, tuple[jax.Array, tuple[int, ...]]] = {
        "weight": (weight, (channels, keep + 1)),
        "state": (state, (state.shape[0], keep, *cut)),
    }
    if bias is not None:
        expected["bias"] = (bias, (channels,))
    check_shapes(OP, expected)
    if activation not in ("silu", None):
        raise ValueError(f"{OP}: activation must be 'silu' or None, got {activation!r}")
    check_floating(OP, x=x, weight=weight)
    check_pool(OP, "state", state)
    check_rows(OP, num_tokens, ragged, read_slots, write_slots)
