"""Prefill of the gated delta rule on GPUs: chunks in WY form, by two Triton kernels.

The first one inverts the triangular system of every chunk, all at once. The second one carries the
states over the chunks. Letters as in `gpu_chunks`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import gpu_chunks
from pallas_kernels.gpu_chunks import Chunk, decay, product
from pallas_kernels.gpu_rows import F32, Slots
from pallas_kernels.gpu_tiles import Tile, tile_table
from pallas_kernels.ragged import RaggedBatch

CHUNK = 64
COLUMNS = 16  # of a state, to a program


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
    _, k, v, g, beta = tokens
    num_tokens, heads, _ = v.shape
    tiles = tile_table(ragged, num_tokens, CHUNK)
    inverse = pl.pallas_call(
        functools.partial(_inverse_kernel, l2norm=l2norm),
        grid=(tiles.shape[0], heads),
        # Row i of a chunk's inverse lies at its token i.
        out_shape=jax.ShapeDtypeStruct((num_tokens, heads, CHUNK), v.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gated_delta_inverse",
    )(tiles, k, g, beta)
    return gpu_chunks.prefill(
        functools.partial(_chunk, scale=scale, l2norm=l2norm), (*tokens, inverse), out, state,
        ragged, slots, name="gated_delta_prefill", chunk=CHUNK, columns=COLUMNS,
        interpret=interpret,
    )  # fmt: skip


def _inverse_kernel(tiles: Any, k: Any, g: Any, beta: Any, inverse: Any, *, l2norm: bool) -> None:
    """(I + A)^-1 of one chunk and value head, as in `reference.within_chunk`."""
    tile, head = Tile.read(tiles, pl.program_id(0)), pl.program_id(1)
    index = jnp.arange(CHUNK)
    real = (index < tile.length) & (tile.row >= 0)
    chunk = Chunk(tile.start + index, real, head, inverse.shape[1])
    keys = _keys(chunk, k, l2norm)
    total, strength = jnp.cumsum(chunk.gates(g)), chunk.gates(beta)
    i, j = index[:, None], index[None]
    scores = strength[:, None] * product(keys, keys.T) * decay(total)
    below = jnp.where(i > j, scores, 0.0)
    # Blocks of the diagonal are merged pairwise, as in `reference.unit_lower_inverse`.
    solved, width = jnp.where(i == j, 1.0, 0.0).astype(F32), 1
    while width < CHUNK:
        first, second = lax.div(j, width), lax.div(i, width)
        corner = (first + 1 == second) & (lax.rem(first, 2) == 0)
        block = jnp.where(corner, below, 0.0)
        solved = solved - (block if width == 1 else product(product(solved, block), solved))
        width *= 2
    plgpu.store(
        inverse.at[chunk.token[:, None], head, j], solved.astype(inverse.dtype),
        mask=jnp.broadcast_to(real[:, None], solved.shape),
    )  # fmt: skip


def _chunk(
    chunk: Chunk, column: jax.Array, old: jax.Array, q: Any, k: Any, v: Any, g: Any, beta: Any,
    inverse: Any, *, scale: float, l2norm: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Some columns of one chunk."""
    queries, keys = (_keys(chunk, x, l2norm) for x in (q, k))
    total, strength = jnp.cumsum(chunk.gates(g)), chunk.gates(beta)
    solved = chunk.keys(inverse)  # [C, C]
    grown = jnp.exp(total)[:, None] * product(keys, old.astype(keys.dtype))
    error = strength[:, None] * (chunk.values(v, column) - grown)
    delta = product(solved, error.astype(keys.dtype))
    out, new = gpu_chunks.advance(old, queries, keys, delta, total)
    return scale * out, new


def _keys(chunk: Chunk, ref: Any, l2norm: bool) -> jax.Array:
    """Keys or queries [C, D]."""
    x = chunk.keys(ref)
    if not l2norm:
        return x
    wide = x.astype(F32)
    return (wide * lax.rsqrt(jnp.sum(wide * wide, axis=1) + 1e-6)[:, None]).astype(x.dtype)
