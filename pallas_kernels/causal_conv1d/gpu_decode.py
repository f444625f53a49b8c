"""Decode of the causal convolution on GPUs: a Triton kernel that shifts a row's inputs in place.

A program has some channels of one row. It reads their last inputs from one slot and writes them,
shifted by the new one, to another or the same one, and nobody else touches them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import storage
from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32
CHANNELS = 512  # per program of 128 threads


def decode(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: tuple[jax.Array, jax.Array],
    *,
    activation: str | None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The decode rows of a batch.

    Args:
        x: [S, C]. weight: [C, W]. bias: [C] or None.
        state: [slots, W - 1, C], updated in place if it is donated.
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        activation: "silu" or None.
        interpret: as in `pl.pallas_call`.

    Returns:
        y [S, C], 0 for padding rows, and the new `state`.
    """
    rows, channels = x.shape
    optional = () if bias is None else (bias,)
    operands = (x, weight, ragged.seq_lens, ragged.counts, *slots, *optional, state)
    y, state = pl.pallas_call(
        functools.partial(_kernel, activation=activation),
        grid=(pl.cdiv(channels, CHANNELS), rows),
        out_shape=tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, state)),
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="causal_conv1d_decode",
    )(*operands)
    return y, state


def _kernel(
    x: Any, weight: Any, seq_lens: Any, counts: Any, sources: Any, targets: Any, *refs: Any,
    activation: str | None,
) -> None:  # fmt: skip
    """Some channels of one row. refs: the bias if there is one, state, y, state."""
    *bias, _, y, state = refs
    part, row = pl.program_id(0), pl.program_id(1)
    keep = state.shape[1]
    channel = part * CHANNELS + jnp.arange(CHANNELS)
    real = channel < x.shape[1]
    decodes = row < counts[0]
    # Without earlier tokens nothing is read: the slot may hold anything.
    read = real & decodes & (seq_lens[row] > 1)
    # Read through the reference that is written to, so that nothing is written before it is read.
    source = sources[row]
    stored = [plgpu.load(state.at[source, j, channel], mask=read, other=0) for j in range(keep)]
    new = plgpu.load(x.at[row, channel], mask=real, other=0.0)
    stored.append(storage.encode(new, state.dtype))
    total = jnp.zeros(channel.shape, F32)
    for j, tap in enumerate([*(storage.decode(one) for one in stored[:-1]), new]):
        factor = plgpu.load(weight.at[channel, j], mask=real, other=0.0)
        total += tap.astype(F32) * factor.astype(F32)
    if bias:
        total += plgpu.load(bias[0].at[channel], mask=real, other=0.0).astype(F32)
    if activation == "silu":
        total = total * lax.logistic(total)
    total = jnp.where(decodes, total, 0.0)
    plgpu.store(y.at[row, channel], total.astype(y.dtype), mask=real)
    for j in range(keep):
        plgpu.store(state.at[targets[row], j, channel], stored[j + 1], mask=real & decodes)
