"""Prefill of the causal convolution on GPUs: a Triton kernel over tiles of tokens and channels.

A tile of a row's first tokens reads the inputs before them from the row's state. Only a second
kernel, with a program per row, writes states: by then all tiles have read what they need.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import storage
from pallas_kernels.causal_conv1d.gpu_decode import CHANNELS
from pallas_kernels.gpu_rows import F32, Slots
from pallas_kernels.gpu_tiles import Tile, tile_table
from pallas_kernels.ragged import RaggedBatch

TILE_TOKENS, TILE_CHANNELS = 32, 64  # per program of 128 threads


def prefill(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    y: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    activation: str | None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The prefill rows of a batch.

    Args:
        x: [T, C]. weight: [C, W]. bias: [C] or None.
        y: [T, C] with the output of the decode rows.
        state: [slots, W - 1, C].
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        activation: "silu" or None.
        interpret: as in `pl.pallas_call`.

    Returns:
        `y` with the output of the prefill rows and 0 for padding tokens, and `state` with their
        last inputs, both updated in place.
    """
    num_tokens, channels = x.shape
    tiles = tile_table(ragged, num_tokens, TILE_TOKENS)
    starts, lens, (sources, targets) = ragged.query_start_loc, ragged.seq_lens, slots
    shape = jax.ShapeDtypeStruct
    y_shape, state_shape = shape(y.shape, y.dtype), shape(state.shape, state.dtype)

    def call(kernel: Callable[..., None], name: str, **options: Any) -> Callable[..., Any]:
        parameters = plgpu.CompilerParams(num_warps=4, num_stages=1)
        return pl.pallas_call(
            kernel, compiler_params=parameters, interpret=interpret, name=name, **options
        )

    operands = (tiles, starts, sources, x, weight, *(() if bias is None else (bias,)), y, state)
    y, state = call(
        functools.partial(_tile_kernel, activation=activation),
        "causal_conv1d_prefill",
        grid=(tiles.shape[0], pl.cdiv(channels, TILE_CHANNELS)),
        out_shape=(y_shape, state_shape),
        input_output_aliases={len(operands) - 2: 0, len(operands) - 1: 1},
    )(*operands)
    (state,) = call(
        _tail_kernel,
        "causal_conv1d_tails",
        grid=(ragged.num_rows_padded, pl.cdiv(channels, CHANNELS)),
        out_shape=(state_shape,),
        input_output_aliases={6: 0},
    )(starts, lens, ragged.counts, sources, targets, x, state)
    return y, state


def _tile_kernel(
    tiles: Any, starts: Any, sources: Any, x: Any, weight: Any, *refs: Any, activation: str | None
) -> None:
    """Some channels of one tile. refs: the bias if there is one, y and state before, y, state."""
    *bias, _, _, y, state = refs
    keep = state.shape[1]
    tile = Tile.read(tiles, pl.program_id(0))
    row = jnp.maximum(tile.row, 0)
    first = starts[row]
    token = tile.start + jnp.arange(TILE_TOKENS)
    channel = pl.program_id(1) * TILE_CHANNELS + jnp.arange(TILE_CHANNELS)
    real_channel = channel < x.shape[1]
    mask = (token < tile.start + tile.length)[:, None] & real_channel[None]
    real = mask & (tile.row >= 0)
    # The position of a row's first token in this step is that of a tile less the tokens between.
    continues = tile.position > tile.start - first
    total = jnp.zeros(mask.shape, F32)
    for j in range(keep + 1):
        source = token - (keep - j)
        inside = (source >= first)[:, None]
        new = plgpu.load(x.at[source[:, None], channel[None]], mask=real & inside, other=0.0)
        entry = keep + source - first  # of the state; below `keep` for inputs before this step
        at = state.at[sources[row], entry[:, None], channel[None]]
        stored = plgpu.load(at, mask=real & ~inside & continues, other=0)
        tap = jnp.where(inside, new, storage.decode(stored).astype(new.dtype))
        factor = plgpu.load(weight.at[channel, j], mask=real_channel, other=0.0)
        total += tap.astype(F32) * factor.astype(F32)[None]
    if bias:
        total += plgpu.load(bias[0].at[channel], mask=real_channel, other=0.0).astype(F32)[None]
    if activation == "silu":
        total = total * lax.logistic(total)
    total = jnp.where(real, total, 0.0).astype(y.dtype)
    plgpu.store(y.at[token[:, None], channel[None]], total, mask=mask)


def _tail_kernel(
    starts: Any, lens: Any, counts: Any, sources: Any, targets: Any, x: Any, before: Any, state: Any
) -> None:
    """The last inputs of one row, for some channels."""
    del before
    keep = state.shape[1]
    row = pl.program_id(0)
    prefills = (row >= counts[0]) & (row < counts[1])
    length = starts[row + 1] - starts[row]
    channel = pl.program_id(1) * CHANNELS + jnp.arange(CHANNELS)
    mask = (channel < x.shape[1]) & prefills
    tail = []
    for j in range(keep):
        entry = length + j  # of the state followed by the tokens
        token, inside = starts[row] + entry - keep, entry >= keep
        new = plgpu.load(x.at[token, channel], mask=mask & inside, other=0.0)
        continues = ~inside & (lens[row] > length)
        stored = plgpu.load(state.at[sources[row], entry, channel], mask=mask & continues, other=0)
        tail.append(jnp.where(inside, storage.encode(new, state.dtype), stored))
    for j, inputs in enumerate(tail):
        plgpu.store(state.at[targets[row], j, channel], inputs, mask=mask)
