"""The gated delta rule in plain JAX: the definition of correct, and the path on CPU.

Per value head, with state S[dk, dv], decay e^g (one, or one per key channel) and write strength
beta:

    S <- diag(e^g) S;  S <- S + k (x) beta (v - S^T k);  o = S^T q

Everything is computed in float32; only a pool of states may hold bfloat16. Letters: T tokens,
C chunk, Hk key heads, Hv value heads.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import decay, recurrence
from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32
BASE = 8  # width of the triangular blocks that are inverted row by row


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial: jax.Array | None = None,
    *,
    scale: float | None = None,
    l2norm: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """One sequence, token by token. Differentiable; batch it with `jax.vmap`.

    Args:
        q: [T, Hk, dk] queries.
        k: [T, Hk, dk] keys; key head j serves value heads [j * Hv / Hk, (j + 1) * Hv / Hk).
        v: [T, Hv, dv] values.
        g: [T, Hv] or [T, Hv, dk] log decay, <= 0.
        beta: [T, Hv] write strength.
        initial: f32[Hv, dk, dv] state before the first token; None: zeros.
        scale: factor on q; None: dk ** -0.5.
        l2norm: normalise q and k per head (before the scale).

    Returns:
        out [T, Hv, dv] in the dtype of v, and the final state f32[Hv, dk, dv].
    """
    tokens = prepare(q, k, v, g, beta, scale=scale, l2norm=l2norm)
    state = zeros_like_state(k, v) if initial is None else initial.astype(F32)
    out, final = recurrence.recurrent(token_update, tokens, state)
    return out.astype(v.dtype), final


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial: jax.Array | None = None,
    chunk: int = 64,
    *,
    scale: float | None = None,
    l2norm: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The same function as `recurrent`, in matrix products over `chunk` tokens at a time.

    `chunk` must be a power of two. Arguments and results are those of `recurrent`.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk must be a power of two, got {chunk}")
    tokens = prepare(q, k, v, g, beta, scale=scale, l2norm=l2norm)
    state = zeros_like_state(k, v) if initial is None else initial.astype(F32)
    out, final = recurrence.chunked(RECURRENCE, tokens, state, chunk)
    return out.astype(v.dtype), final


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    scale: float | None,
    l2norm: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `api.gated_delta_rule`."""
    tokens = prepare(q, k, v, g, beta, scale=scale, l2norm=l2norm)
    slots = read_slots, write_slots
    out, state = recurrence.ragged(RECURRENCE, tokens, state, ragged, *slots, v.shape[1:])
    return out.astype(v.dtype), state


def prepare(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None,
    l2norm: bool,
) -> tuple[jax.Array, ...]:
    """The operands as `token_update` takes them: float32, q and k normalised, q scaled.

    q and k [T, Hk, dk] become [T, Hv, dk], their heads repeated; g becomes [T, Hv, 1 or dk].
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, g, beta = (x.astype(F32) for x in (q, k, v, g, beta))
    if l2norm:
        q, k = (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    repeats = v.shape[-2] // k.shape[-2]
    q, k = jnp.repeat(q * factor, repeats, axis=-2), jnp.repeat(k, repeats, axis=-2)
    return q, k, v, g if g.ndim == 3 else g[:, :, None], beta


def zeros_like_state(k: jax.Array, v: jax.Array) -> jax.Array:
    """f32[Hv, dk, dv] zeros for k [..., dk] and v [..., Hv, dv]."""
    return jnp.zeros((v.shape[-2], k.shape[-1], v.shape[-1]), F32)


def token_update(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token: state [Hv, dk, dv], q and k [Hv, dk], v [Hv, dv], g [Hv, 1 or dk], beta [Hv].

    Returns out [Hv, dv] and the new state. The output is taken from the old state,
    S'^T q = S^T (e^g q) + (k . q) delta, so that the state is read once for both products.
    """
    kept = jnp.exp(g)
    old_k, old_q = (jnp.sum(state * (kept * x)[:, :, None], axis=1) for x in (k, q))
    delta = beta[:, None] * (v - old_k)
    out = old_q + jnp.sum(q * k, axis=-1, keepdims=True) * delta
    return out, kept[:, :, None] * state + k[:, :, None] * delta[:, None, :]


def within_chunk(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, ...]:
    """What a chunk [C, Hv, ...] needs that does not depend on the state, heads first.

    Returns q and k decayed since the chunk began and k decayed until it ends [Hv, C, dk], the
    decay over the chunk [Hv, 1 or dk], v and beta, the inverse of I + A [Hv, C, C] with
    A[i, j] = beta_i k_i . (decayed) k_j for j < i, and the decayed scores q_i . k_j.
    """
    q, k, v, g, beta = (jnp.swapaxes(x, 0, 1) for x in (q, k, v, g, beta))
    total = jnp.cumsum(g, axis=1)
    last = total[:, -1:]
    diagonal = jnp.eye(g.shape[1], dtype=bool)[None]
    below = jnp.where(diagonal, 0.0, beta[:, :, None] * decay.scores(k, k, total))
    inverse = unit_lower_inverse(below)
    grown = jnp.exp(total)
    keys = grown * k, jnp.exp(last - total) * k
    return grown * q, *keys, jnp.exp(last[:, 0]), v, beta, inverse, decay.scores(q, k, total)


def across_chunks(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    k_end: jax.Array,
    kept: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    inverse: jax.Array,
    scores: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Carries state [Hv, dk, dv] over one chunk, the rest as from `within_chunk`.

    Returns out [C, Hv, dv] and the state after the chunk.
    """
    delta = inverse @ (beta[:, :, None] * (v - k @ state))
    out = q @ state + scores @ delta
    new = jnp.einsum("hid,hiv->hdv", k_end, delta)
    return jnp.swapaxes(out, 0, 1), kept[:, :, None] * state + new


RECURRENCE = recurrence.Recurrence(token_update, within_chunk, across_chunks)


@jax.custom_jvp
def unit_lower_inverse(strict: jax.Array) -> jax.Array:
    """Inverse of I + A for strictly lower triangular A [H, C, C], C a power of two.

    Forward substitution inverts small diagonal blocks, which are then merged pairwise:
    [[P, 0], [B, Q]]^-1 = [[P^-1, 0], [-Q^-1 B P^-1, Q^-1]]. Unlike a series in powers of A, which
    explodes when keys repeat, this is as accurate as forward substitution.
    """
    heads, size, _ = strict.shape
    width = min(BASE, size)
    inverse = _substitute(_diagonal_blocks(strict, width))
    while width < size:
        count = size // (2 * width)
        below = _diagonal_blocks(strict, 2 * width)[:, :, width:, :width]
        pairs = inverse.reshape(heads, count, 2, width, width)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        corner = -(second @ below @ first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverse.reshape(heads, size, size)


def _diagonal_blocks(matrix: jax.Array, width: int) -> jax.Array:
    """[H, C, C] -> [H, C / width, width, width]."""
    starts = range(0, matrix.shape[-1], width)
    return jnp.stack([matrix[:, i : i + width, i : i + width] for i in starts], axis=1)


def _substitute(strict: jax.Array) -> jax.Array:
    """Inverse of I + A for small strictly lower triangular blocks [..., w, w], row by row."""
    width = strict.shape[-1]
    eye = jnp.eye(width, dtype=strict.dtype)
    rows: list[jax.Array] = []
    for i in range(width):
        row = jnp.broadcast_to(eye[i], strict.shape[:-1][:-1] + (width,))
        for j, solved in enumerate(rows):
            row = row - strict[..., i, j, None] * solved
        rows.append(row)
    return jnp.stack(rows, axis=-2)


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(*primals)
    return inverse, -(inverse @ tangents[0] @ inverse)
