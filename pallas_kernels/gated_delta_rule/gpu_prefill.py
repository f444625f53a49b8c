"""Prefill of the gated delta rule on GPUs: chunks in WY form, by two Triton kernels.

The first one inverts the triangular system of every chunk, all at once. In the second one a program
has some columns of one head's state in registers and goes over its row's chunks: what is left there
are products. Letters: C chunk, D is dk up to a power of two.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import gpu_chip
from pallas_kernels.gpu_rows import F32, Slots
from pallas_kernels.gpu_tiles import Tile, tile_table
from pallas_kernels.ragged import RaggedBatch

CHUNK = 64
COLUMNS = 16  # of a state, to a program
LOWEST = -1e30  # an exponent of nothing


def prefill(
    tokens: tuple[jax.Array, ...],
    out: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    scale: float,
    l2norm: bool,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The prefill rows of a batch.

    Args:
        tokens: q, k [T, Hk, dk], v [T, Hv, dv], g and beta [T, Hv].
        out: [T, Hv, dv] with the output of the decode rows.
        state: [slots, Hv, dk, dv].
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        scale: factor on q.
        l2norm: normalise q and k.
        interpret: as in `pl.pallas_call`.

    Returns:
        `out` with the output of the prefill rows and 0 for padding tokens, and `state` with their
        last states, both updated in place.
    """
    q, k, v, g, beta = tokens
    num_tokens, heads, dv = v.shape
    tiles = tile_table(ragged, num_tokens, CHUNK)
    shape = jax.ShapeDtypeStruct
    inverse, out = pl.pallas_call(
        lambda *refs: _inverse_kernel(*refs, l2norm=l2norm),
        grid=(tiles.shape[0], heads),
        # Row i of a chunk's inverse lies at its token i.
        out_shape=(shape((num_tokens, heads, CHUNK), v.dtype), shape(out.shape, out.dtype)),
        input_output_aliases={4: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gated_delta_inverse",
    )(tiles, k, g, beta, out)
    batch = ragged.query_start_loc, ragged.seq_lens, ragged.counts, *slots
    operands = (*batch, q, k, v, g, beta, inverse, out, state)
    return pl.pallas_call(
        lambda *refs: _chunks_kernel(*refs, scale=scale, l2norm=l2norm),
        grid=(pl.cdiv(dv, COLUMNS), heads, ragged.num_rows_padded),
        out_shape=(shape(out.shape, out.dtype), shape(state.shape, state.dtype)),
        input_output_aliases={len(operands) - 2: 0, len(operands) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="gated_delta_prefill",
    )(*operands)


def _inverse_kernel(
    tiles: Any, k: Any, g: Any, beta: Any, before: Any, inverse: Any, out: Any, *, l2norm: bool
) -> None:
    """(I + A)^-1 of one chunk and value head, as in `reference.within_chunk`. Clears padding."""
    del before
    tile, head = Tile.read(tiles, pl.program_id(0)), pl.program_id(1)
    index = jnp.arange(CHUNK)
    inside = index < tile.length
    token, real = tile.start + index, inside & (tile.row >= 0)
    keys = _keys(k, token, lax.div(head, out.shape[1] // k.shape[1]), real, l2norm)
    total = jnp.cumsum(plgpu.load(g.at[token, head], mask=real, other=0.0))
    strength = plgpu.load(beta.at[token, head], mask=real, other=0.0)
    i, j = index[:, None], index[None]
    scores = strength[:, None] * _product(keys, keys.T) * _decay(total)
    below = jnp.where(i > j, scores, 0.0)
    # Blocks of the diagonal are merged pairwise, as in `reference.unit_lower_inverse`.
    solved, width = jnp.where(i == j, 1.0, 0.0).astype(F32), 1
    while width < CHUNK:
        first, second = lax.div(j, width), lax.div(i, width)
        corner = (first + 1 == second) & (lax.rem(first, 2) == 0)
        block = jnp.where(corner, below, 0.0)
        solved = solved - (block if width == 1 else _product(_product(solved, block), solved))
        width *= 2
    plgpu.store(
        inverse.at[token[:, None], head, j], solved.astype(inverse.dtype),
        mask=jnp.broadcast_to(real[:, None], solved.shape),
    )  # fmt: skip
    channel = jnp.arange(gpu_chip.power_of_two(out.shape[2]))
    cleared = (inside & (tile.row < 0))[:, None] & (channel < out.shape[2])[None]
    zeros = jnp.zeros(cleared.shape, out.dtype)
    plgpu.store(out.at[token[:, None], head, channel[None]], zeros, mask=cleared)


def _chunks_kernel(
    starts: Any, lens: Any, counts: Any, sources: Any, targets: Any, q: Any, k: Any, v: Any, g: Any,
    beta: Any, inverse: Any, before: Any, state_before: Any, out: Any, state: Any, *,
    scale: float, l2norm: bool,
) -> None:  # fmt: skip
    """Some columns of one head's state over all chunks of one row."""
    del before, state_before
    part, head, row = (pl.program_id(axis) for axis in range(3))
    _, heads, dk, dv = state.shape
    key_head = lax.div(head, heads // k.shape[1])
    start = starts[row]
    prefills = (row >= counts[0]) & (row < counts[1])
    end = jnp.where(prefills, starts[row + 1], start)
    channel = jnp.arange(_tile(dk))[:, None]
    column = (part * COLUMNS + jnp.arange(COLUMNS))[None]
    real_column = column < dv
    place, tile = (head, channel, column), (channel < dk) & real_column
    continues = prefills & (lens[row] > end - start)
    old = plgpu.load(state.at[sources[row], *place], mask=tile & continues, other=0)

    def chunk(i: jax.Array, old: jax.Array) -> jax.Array:
        token = start + i * CHUNK + jnp.arange(CHUNK)
        real = token < end
        queries, keys = (_keys(x, token, key_head, real, l2norm) for x in (q, k))
        values_at, mask = (token[:, None], head, column), real[:, None] & real_column
        values = plgpu.load(v.at[values_at], mask=mask, other=0.0).astype(F32)
        total = jnp.cumsum(plgpu.load(g.at[token, head], mask=real, other=0.0))
        strength = plgpu.load(beta.at[token, head], mask=real, other=0.0)
        last, grown = jnp.min(total), jnp.exp(total)  # it never rises
        at = inverse.at[token[:, None], head, jnp.arange(CHUNK)[None]]
        square = jnp.broadcast_to(real[:, None], (CHUNK, CHUNK))
        solved = plgpu.load(at, mask=square, other=0.0)
        rounded = old.astype(keys.dtype)
        error = strength[:, None] * (values - grown[:, None] * _product(keys, rounded))
        delta = _product(solved, error.astype(keys.dtype))
        scores = (_product(queries, keys.T) * _decay(total)).astype(keys.dtype)
        result = grown[:, None] * _product(queries, rounded)
        result = scale * (result + _product(scores, delta.astype(keys.dtype)))
        plgpu.store(out.at[values_at], result.astype(out.dtype), mask=mask)
        kept = jnp.exp(last - total)[:, None] * delta
        return jnp.exp(last) * old + _product(keys.T, kept.astype(keys.dtype))

    new = lax.fori_loop(0, lax.div(end - start + CHUNK - 1, CHUNK), chunk, old.astype(F32))
    plgpu.store(state.at[targets[row], *place], new.astype(state.dtype), mask=tile & prefills)


def _keys(ref: Any, token: jax.Array, head: jax.Array, real: jax.Array, l2norm: bool) -> jax.Array:
    """Keys or queries [C, D] of one key head."""
    dk = ref.shape[2]
    channel = jnp.arange(_tile(dk))[None]
    mask = real[:, None] & (channel < dk)
    x = plgpu.load(ref.at[token[:, None], head, channel], mask=mask, other=0.0)
    if not l2norm:
        return x
    wide = x.astype(F32)
    return (wide * lax.rsqrt(jnp.sum(wide * wide, axis=1) + 1e-6)[:, None]).astype(x.dtype)


def _tile(dk: int) -> int:
    """Key channels filled up to what products take."""
    return max(gpu_chip.power_of_two(dk), 16)


def _decay(total: jax.Array) -> jax.Array:
    """e^(total_i - total_j) [C, C] for j <= i, else 0."""
    index = jnp.arange(CHUNK)
    lower = index[:, None] >= index[None]
    return jnp.exp(jnp.where(lower, total[:, None] - total[None], LOWEST))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """With float32 sums; float32 operands are rounded to tf32."""
    return plgpu.dot(a, b)
