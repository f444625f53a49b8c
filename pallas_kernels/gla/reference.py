"""Gated linear attention in plain JAX: the definition of correct, and the path on CPU.

Per value head, with state S[dk, dv] and decay e^g (one, or one per key channel):

    S <- diag(e^g) S + k (x) v;  o = S^T q

Everything is computed in float32. Letters: T tokens, C chunk, Hk key heads, Hv value heads.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import decay, recurrence
from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    initial: jax.Array | None = None,
    *,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One sequence, token by token. Differentiable; batch it with `jax.vmap`.

    Args:
        q: [T, Hk, dk] queries.
        k: [T, Hk, dk] keys; key head j serves value heads [j * Hv / Hk, (j + 1) * Hv / Hk).
        v: [T, Hv, dv] values.
        g: [T, Hv] or [T, Hv, dk] log decay, <= 0.
        initial: f32[Hv, dk, dv] state before the first token; None: zeros.
        scale: factor on q; None: dk ** -0.5.

    Returns:
        out [T, Hv, dv] in the dtype of v, and the final state f32[Hv, dk, dv].
    """
    tokens = prepare(q, k, v, g, scale=scale)
    out, final = recurrence.recurrent(RECURRENCE.token, tokens, _initial(initial, k, v))
    return out.astype(v.dtype), final


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    initial: jax.Array | None = None,
    chunk: int = 64,
    *,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The same function as `recurrent`, in matrix products over `chunk` tokens at a time."""
    tokens = prepare(q, k, v, g, scale=scale)
    out, final = recurrence.chunked(RECURRENCE, tokens, _initial(initial, k, v), chunk)
    return out.astype(v.dtype), final


def gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    scale: float | None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.gla`."""
    tokens = prepare(q, k, v, g, scale=scale)
    slots = read_slots, write_slots
    out, state = recurrence.ragged(RECURRENCE, tokens, state, ragged, *slots, v.shape[1:])
    return out.astype(v.dtype), state


def prepare(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, *, scale: float | None
) -> tuple[jax.Array, ...]:
    """The operands as `RECURRENCE` takes them: float32, q scaled, q and k [T, Hv, dk], their
    heads repeated, g [T, Hv, 1 or dk].
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    repeats = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x.astype(F32), repeats, axis=1) for x in (q, k))
    g = g.astype(F32)
    return q * factor, k, v.astype(F32), g if g.ndim == 3 else g[:, :, None]


def _initial(initial: jax.Array | None, k: jax.Array, v: jax.Array) -> jax.Array:
    if initial is None:
        return jnp.zeros((v.shape[1], k.shape[2], v.shape[2]), F32)
    return initial.astype(F32)


def _token(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token: state [Hv, dk, dv], q and k [Hv, dk], v [Hv, dv], g [Hv, 1 or dk]."""
    state = jnp.exp(g)[:, :, None] * state + k[:, :, None] * v[:, None, :]
    return jnp.sum(state * q[:, :, None], axis=1), state


def _within(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    """What a chunk [C, Hv, ...] needs that does not depend on the state, heads first.

    Returns q decayed since the chunk began and k decayed until it ends [Hv, C, dk], the decay over
    the chunk [Hv, 1 or dk], v [Hv, C, dv] and the decayed scores [Hv, C, C].
    """
    q, k, v, g = (jnp.swapaxes(x, 0, 1) for x in (q, k, v, g))
    total = jnp.cumsum(g, axis=1)
    last = total[:, -1:]
    scores = decay.scores(q, k, total)
    return jnp.exp(total) * q, jnp.exp(last - total) * k, jnp.exp(last[:, 0]), v, scores


def _across(
    state: jax.Array, q: jax.Array, k: jax.Array, kept: jax.Array, v: jax.Array, scores: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Carries state [Hv, dk, dv] over a chunk, the rest as from `_within`. Out [C, Hv, dv]."""
    out = q @ state + scores @ v
    state = kept[:, :, None] * state + jnp.einsum("hid,hiv->hdv", k, v)
    return jnp.swapaxes(out, 0, 1), state


RECURRENCE = recurrence.Recurrence(_token, _within, _across)
