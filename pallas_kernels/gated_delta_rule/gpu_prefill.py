"""Prefill of the gated delta rule on GPUs: chunks in WY form, by three Triton kernels.

The first one scores the keys of every chunk for its queries and keys, the second one inverts its
triangular system, all chunks at once. The third one carries the states over the chunks. Letters as
in `gpu_chunks`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import gpu_chunks, gpu_decay
from pallas_kernels.gpu_chunks import CHUNK, Chunk, Decay, parts
from pallas_kernels.gpu_rows import F32, Slots
from pallas_kernels.ragged import RaggedBatch

COLUMNS = 32  # of a state, to a program


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
        tokens: q, k [T, Hk, dk], v [T, Hv, dv], g f32[T, Hv] or [T, Hv, dk], beta [T, Hv].
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
    if l2norm:
        q, k = _normalised(q), _normalised(k)
    run = functools.partial(
        gpu_chunks.beforehand, ragged=ragged, heads=v.shape[1], chunk=CHUNK, warps=8,
        interpret=interpret,
    )  # fmt: skip
    # Row i of a chunk's scores and inverse lies at its token i.
    square, exact = (jax.ShapeDtypeStruct((*v.shape[:2], CHUNK), x) for x in (v.dtype, F32))
    if g.ndim == 2:
        scores, of_keys = run(_scores, (q, k, g), [square, exact], name="gated_delta_scores")
        body, first, last = _chunk, (q, k, g), ()
    else:
        decayed = gpu_decay.decayed((q, k), k, g, ragged, CHUNK, interpret)
        scores, of_keys = decayed.scores
        body, first, last = _channel_chunk, decayed.grown, (decayed.rest, decayed.whole)
    (inverse,) = run(_inverse, (of_keys, beta), [square], name="gated_delta_inverse")
    operands = v, scores, inverse, *first, *last
    return gpu_chunks.prefill(
        functools.partial(body, scale=scale), operands, out, state, ragged, slots,
        name="gated_delta_prefill", chunk=CHUNK, columns=COLUMNS, interpret=interpret,
    )  # fmt: skip


def _normalised(x: jax.Array) -> jax.Array:
    wide = x.astype(F32)
    norm = lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * norm).astype(x.dtype)


def _scores(chunk: Chunk, q: Any, k: Any, g: Any, scores: Any, of_keys: Any) -> None:
    """Of one chunk's queries and keys with its keys."""
    keys, total = chunk.keys(k), jnp.cumsum(chunk.gates(g))
    chunk.write(scores, gpu_chunks.head_scores(chunk.keys(q), keys, total))
    chunk.write(of_keys, gpu_chunks.head_scores(keys, keys, total))


def _inverse(chunk: Chunk, of_keys: Any, beta: Any, inverse: Any) -> None:
    """Writes (I + diag(beta) A)^-1 diag(beta) of one chunk, A the scores below the diagonal."""
    strength, index = chunk.gates(beta), jnp.arange(CHUNK)
    lower = index[:, None] > index[None]
    below = jnp.where(lower, strength[:, None] * chunk.keys(of_keys), 0.0)
    chunk.write(inverse, inverse_of(below) * strength[None])


def inverse_of(below: jax.Array) -> jax.Array:
    """(I + A)^-1 for strictly lower triangular A [C, C]: `reference.unit_lower_inverse`.

    Operands of products are two parts in bfloat16, 16 bits together, so that interpreters round as
    GPUs do.
    """
    index = jnp.arange(CHUNK)
    i, j = index[:, None], index[None]

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        (a, a_rest), (b, b_rest) = parts(a, 2), parts(b, 2)
        return plgpu.dot(a, b_rest) + plgpu.dot(a_rest, b) + plgpu.dot(a, b)

    def corners(bit: jax.Array | int) -> jax.Array:
        """What lies between neighbouring blocks of 2^bit."""
        return jnp.where(lax.shift_right_logical(i ^ j, bit) == 1, below, 0.0)

    def merge(bit: jax.Array, solved: jax.Array) -> jax.Array:
        return solved - dot(dot(solved, corners(bit)), solved)

    pairs = jnp.where(i == j, 1.0, 0.0).astype(F32) - corners(0)
    return lax.fori_loop(1, CHUNK.bit_length() - 1, merge, pairs)


def _chunk(
    chunk: Chunk, column: jax.Array, old: jax.Array, v: Any, scores: Any, inverse: Any, q: Any,
    k: Any, g: Any, *, scale: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Some columns of one chunk."""
    queries, keys = chunk.keys(q), chunk.keys(k)
    decay = Decay.of(jnp.cumsum(chunk.gates(g)))
    error = chunk.values(v, column) - decay.growth * plgpu.dot(keys, old.astype(keys.dtype))
    delta = plgpu.dot(chunk.keys(inverse), error.astype(keys.dtype))
    out, new = gpu_chunks.advance(old, queries, keys, delta, chunk.keys(scores), decay)
    return scale * out, new


def _channel_chunk(
    chunk: Chunk, column: jax.Array, old: jax.Array, v: Any, scores: Any, inverse: Any,
    queries: Any, grown: Any, rest: Any, whole: Any, *, scale: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Some columns of one chunk, with a decay per key channel."""
    keys = chunk.keys(rest)
    error = chunk.values(v, column) - plgpu.dot(chunk.keys(grown), old.astype(keys.dtype))
    delta = plgpu.dot(chunk.keys(inverse), error.astype(keys.dtype))
    out, new = gpu_chunks.advance(
        old, chunk.keys(queries), keys, delta, chunk.keys(scores), gpu_decay.decay_of(chunk, whole)
    )
    return scale * out, new
