"""Mamba-1's selective scan in plain JAX: the definition of correct, and the path on CPU.

Per channel, with state S[N] and dt = softplus(dt + dt_bias):

    S <- e^(dt A) S + B dt x;  y = S . C + D x

Every channel and every entry of its state has a decay of its own, so there is no form in matrix
products: everything goes token by token, in float32. Letters: T tokens, E channels, N state size.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import recurrence
from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32


def recurrent(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    initial: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One sequence. Differentiable; batch it with `jax.vmap`.

    Operands as for `api.selective_scan`; `initial` is f32[N, E], None: zeros. Returns y [T, E] in
    the dtype of x, and the final state.
    """
    state = jnp.zeros(A.shape, F32) if initial is None else initial.astype(F32)
    token = functools.partial(_token, A=A.astype(F32), D=skip(D, x))
    y, final = recurrence.recurrent(token, prepare(x, dt, B, C, dt_bias), state)
    return y.astype(x.dtype), final


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None,
    dt_bias: jax.Array | None,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    decode: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """See `api.selective_scan`, and for `decode` `recurrence.ragged`."""
    op = recurrence.sequential(functools.partial(_token, A=A.astype(F32), D=skip(D, x)))
    tokens, slots = prepare(x, dt, B, C, dt_bias), (read_slots, write_slots)
    y, state = recurrence.ragged(op, tokens, state, ragged, *slots, x.shape[1:], decode=decode)
    return y.astype(x.dtype), state


def prepare(
    x: jax.Array, dt: jax.Array, B: jax.Array, C: jax.Array, dt_bias: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """x, step sizes, B and C in float32."""
    return x.astype(F32), step_size(dt, dt_bias), B.astype(F32), C.astype(F32)


def step_size(dt: jax.Array, dt_bias: jax.Array | None) -> jax.Array:
    """f32[T, E]: softplus(dt + dt_bias)."""
    dt = dt.astype(F32)
    return jax.nn.softplus(dt if dt_bias is None else dt + dt_bias.astype(F32)[None])


def skip(D: jax.Array | None, x: jax.Array) -> jax.Array:
    """f32[E]: D, zeros for None."""
    return jnp.zeros(x.shape[1], F32) if D is None else D.astype(F32)


def _token(
    state: jax.Array,
    x: jax.Array,
    dt: jax.Array,
    B: jax.Array,
    C: jax.Array,
    *,
    A: jax.Array,
    D: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token: state and A [N, E]; x, dt, D [E]; B, C [N]."""
    state = jnp.exp(dt[None] * A) * state + B[:, None] * (dt * x)[None]
    return jnp.sum(state * C[:, None], axis=0) + D * x, state
