"""Prefill of gated linear attention on GPUs: chunks, in a Triton kernel.

With a decay per key channel another kernel goes first: the decayed scores of a chunk are no product
of matrices unless exponents may be positive, so that it computes them channel by channel, once for
all columns. Letters as in `gpu_chunks`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import gpu_chunks
from pallas_kernels.gpu_chunks import LOWEST, Chunk, product
from pallas_kernels.gpu_rows import F32, Slots
from pallas_kernels.gpu_tiles import Tile, tile_table
from pallas_kernels.ragged import RaggedBatch

BLOCK = 16  # tokens of a chunk with decays per channel: each takes a pass over the channels


def prefill(
    tokens: tuple[jax.Array, ...],
    out: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    scale: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The prefill rows of a batch.

    Args:
        tokens: q, k [T, Hk, dk], v [T, Hv, dv], g f32[T, Hv] or [T, Hv, dk].
        out: [T, Hv, dv] with the output of the decode rows.
        state: f32[slots, Hv, dk, dv].
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        scale: factor on q.
        interpret: as in `pl.pallas_call`.

    Returns:
        `out` with the output of the prefill rows and 0 for padding tokens, and `state` with their
        last states, both updated in place.
    """
    q, k, _, g = tokens
    body, chunk = _chunk, None
    if g.ndim == 3:
        scores = _scores(q, k, g, ragged, interpret)
        body, chunk, tokens = _channel_chunk, BLOCK, (*tokens, scores)
    return gpu_chunks.prefill(
        functools.partial(body, scale=scale), tokens, out, state, ragged, slots,
        name="gla_prefill", chunk=chunk, interpret=interpret,
    )  # fmt: skip


def _chunk(
    chunk: Chunk, column: jax.Array, old: jax.Array, q: Any, k: Any, v: Any, g: Any, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Some columns of one chunk."""
    queries, keys, values = chunk.keys(q), chunk.keys(k), chunk.values(v, column)
    out, new = gpu_chunks.advance(old, queries, keys, values, jnp.cumsum(chunk.gates(g)))
    return scale * out, new


def _scores(
    q: jax.Array, k: jax.Array, g: jax.Array, ragged: RaggedBatch, interpret: Any
) -> jax.Array:
    """[T, Hv, BLOCK] in the dtype of k: of each token in a prefill row, with those of its chunk."""
    num_tokens, heads, _ = g.shape
    tiles = tile_table(ragged, num_tokens, BLOCK)
    return pl.pallas_call(
        _scores_kernel,
        grid=(tiles.shape[0], heads),
        out_shape=jax.ShapeDtypeStruct((num_tokens, heads, BLOCK), k.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gla_scores",
    )(tiles, q, k, g)


def _scores_kernel(tiles: Any, q: Any, k: Any, g: Any, scores: Any) -> None:
    """sum_d q_i[d] k_j[d] e^(g_(j+1)[d] + ... + g_i[d]) for j <= i of one chunk and value head."""
    tile, head = Tile.read(tiles, pl.program_id(0)), pl.program_id(1)
    index = jnp.arange(BLOCK)
    real = (index < tile.length) & (tile.row >= 0)
    chunk = Chunk(tile.start + index, real, head, g.shape[1])
    queries, keys = (chunk.keys(ref).astype(F32) for ref in (q, k))
    total = jnp.cumsum(chunk.keys(g), axis=0)

    def with_key(j: jax.Array, scores: jax.Array) -> jax.Array:
        here, later = index == j, (index >= j)[:, None]
        key, edge = (jnp.sum(jnp.where(here[:, None], x, 0.0), axis=0) for x in (keys, total))
        decayed = queries * jnp.exp(jnp.where(later, total - edge[None], LOWEST))
        column = jnp.sum(decayed * key[None], axis=1)
        return jnp.where(here[None], column[:, None], scores)

    result = lax.fori_loop(0, BLOCK, with_key, jnp.zeros((BLOCK, BLOCK), F32))
    plgpu.store(
        scores.at[chunk.token[:, None], head, index[None]], result.astype(scores.dtype),
        mask=jnp.broadcast_to(real[:, None], result.shape),
    )  # fmt: skip


def _channel_chunk(
    chunk: Chunk, column: jax.Array, old: jax.Array, q: Any, k: Any, v: Any, g: Any, scores: Any,
    *, scale: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Some columns of one chunk, with a decay per key channel."""
    queries, keys = (chunk.keys(ref).astype(F32) for ref in (q, k))
    values, total = chunk.values(v, column).astype(k.dtype), jnp.cumsum(chunk.keys(g), axis=0)
    last = jnp.min(total, axis=0)  # it never rises
    grown = (queries * jnp.exp(total)).astype(k.dtype)
    kept = (keys * jnp.exp(last[None] - total)).astype(k.dtype)
    out = product(grown, old.astype(k.dtype)) + product(chunk.keys(scores), values)
    return scale * out, jnp.exp(last)[:, None] * old + product(kept.T, values)
