"""Decode of the causal convolution on GPUs: a Triton kernel that shifts a row's inputs in place.

A program has some channels of one row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import gpu_rows, storage
from pallas_kernels.gpu_rows import F32, Row, Slots
from pallas_kernels.ragged import RaggedBatch

CHANNELS = 512  # per program of 128 threads


def decode(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    activation: str | None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The decode rows of a batch.

    Args:
        x: [T, C]. weight: [C, W]. bias: [C] or None.
        state: [slots, W - 1, C], updated in place if it is donated.
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        activation: "silu" or None.
        interpret: as in `pl.pallas_call`.

    Returns:
        y [T, C], 0 for further rows and anything from token S on, and the new `state`.
    """
    optional = () if bias is None else (bias,)
    return gpu_rows.run(
        functools.partial(_row, activation=activation), (x, weight, *optional), state, ragged,
        slots, name="causal_conv1d", grid=(pl.cdiv(x.shape[1], CHANNELS),),
        out=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret,
    )  # fmt: skip


def _row(row: Row, x: Any, weight: Any, *refs: Any, activation: str | None) -> None:
    """Some channels of one row. refs: the bias if there is one, state, y, new state."""
    *bias, _, y, state = refs
    keep = state.shape[1]
    channel = pl.program_id(0) * CHANNELS + jnp.arange(CHANNELS)
    real = channel < x.shape[1]
    # Read through the reference that is written to, so that nothing is written before it is read.
    stored = [row.read(state, (j, channel), real) for j in range(keep)]
    new = plgpu.load(x.at[row.number, channel], mask=real, other=0.0)
    stored.append(storage.encode(new, state.dtype))
    total = jnp.zeros(channel.shape, F32)
    for j, tap in enumerate([*(storage.decode(one) for one in stored[:-1]), new]):
        factor = plgpu.load(weight.at[channel, j], mask=real, other=0.0)
        total += tap.astype(F32) * factor.astype(F32)
    if bias:
        total += plgpu.load(bias[0].at[channel], mask=real, other=0.0).astype(F32)
    if activation == "silu":
        total = total * lax.logistic(total)
    row.finish(y, row.number, (channel,), real, total)
    for j in range(keep):
        row.write(state, (j, channel), real, stored[j + 1])
