"""RWKV-7's recurrence in plain JAX: the definition of correct, and the path on CPU.

Per head, with state S[dk, dv]; heads lie side by side in [dk, H * dv]:

    S <- diag(e^w) S + b (x) S^T a + k (x) v;  o = S^T r

where S^T a reads the state before the token. Everything is computed in float32, token by token:
prefill has no form in matrix products yet. Letters: T tokens, H heads.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import recurrence
from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32


def recurrent(
    r: jax.Array,
    w: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array,
    initial: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One sequence. Differentiable; batch it with `jax.vmap`.

    Operands as for `api.rwkv7`; `initial` is f32[dk, H * dv], None: zeros. Returns out [T, H, dv]
    in the dtype of v, and the final state.
    """
    shape = (k.shape[2], v.shape[1] * v.shape[2])
    state = jnp.zeros(shape, F32) if initial is None else initial.astype(F32)
    tokens = tuple(x.astype(F32) for x in (r, w, k, v, a, b))
    out, final = recurrence.recurrent(_token, tokens, state)
    return out.astype(v.dtype), final


def rwkv7(
    r: jax.Array,
    w: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    decode: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """See `api.rwkv7`, and for `decode` `recurrence.ragged`."""
    tokens = tuple(x.astype(F32) for x in (r, w, k, v, a, b))
    op, slots = recurrence.sequential(_token), (read_slots, write_slots)
    out, state = recurrence.ragged(op, tokens, state, ragged, *slots, v.shape[1:], decode=decode)
    return out.astype(v.dtype), state


def _token(
    state: jax.Array,
    r: jax.Array,
    w: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token: state [dk, H * dv]; r, w, k, a, b [H, dk]; v [H, dv]."""
    r, w, k, a, b = (x.T[:, :, None] for x in (r, w, k, a, b))
    old = state.reshape(-1, *v.shape)
    read = jnp.sum(old * a, axis=0)
    new = jnp.exp(w) * old + b * read[None] + k * v[None]
    return jnp.sum(new * r, axis=0), new.reshape(state.shape)
