"""Mamba-2's recurrence in plain JAX: the definition of correct, and the path on CPU.

Per head, with state S[N, P] and dt = clamp(softplus(dt + dt_bias)):

    S <- e^(dt A) S + B (x) dt x;  y = S^T C + D x

which is gated linear attention with queries C, keys B, values dt x and log decay dt A, and a skip.
Letters: T tokens, H heads, P head dim, G groups, N state size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import recurrence
from pallas_kernels.gla import reference as gla
from pallas_kernels.gla.reference import prepare
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.recurrence import Recurrence, Step

F32 = jnp.float32
NO_LIMIT = (0.0, float("inf"))


def recurrent(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    initial: jax.Array | None = None,
    *,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> tuple[jax.Array, jax.Array]:
    """One sequence, token by token. Differentiable; batch it with `jax.vmap`.

    Operands as for `api.ssd`; `initial` is f32[N, H * P], None: zeros. Returns y [T, H, P] in the
    dtype of x, and the final state.
    """
    tokens = _tokens(x, dt, A, B, C, dt_bias, dt_limit)
    y, final = recurrence.recurrent(RECURRENCE.token, tokens, _initial(initial, x, B))
    return add_skip(y, x, D), final


def chunked(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    initial: jax.Array | None = None,
    chunk: int = 64,
    *,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> tuple[jax.Array, jax.Array]:
    """The same function as `recurrent`, in matrix products over `chunk` tokens at a time."""
    tokens = _tokens(x, dt, A, B, C, dt_bias, dt_limit)
    y, final = recurrence.chunked(RECURRENCE, tokens, _initial(initial, x, B), chunk)
    return add_skip(y, x, D), final


def ssd(
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
    dt_limit: tuple[float, float],
) -> tuple[jax.Array, jax.Array]:
    """See `api.ssd`."""
    tokens = _tokens(x, dt, A, B, C, dt_bias, dt_limit)
    slots = read_slots, write_slots
    y, state = recurrence.ragged(RECURRENCE, tokens, state, ragged, *slots, x.shape[1:])
    # Selected, since padding tokens may hold anything.
    valid = ragged.token_valid(x.shape[0])[:, None, None]
    return add_skip(y, jnp.where(valid, x, jnp.zeros_like(x)), D), state


def _tokens(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    dt_bias: jax.Array | None,
    dt_limit: tuple[float, float],
) -> tuple[jax.Array, ...]:
    """The operands as `gla` takes them."""
    dt = step_size(dt, dt_bias, dt_limit)
    return prepare(C, B, dt[:, :, None] * x.astype(F32), dt * A.astype(F32)[None], scale=1.0)


def _initial(initial: jax.Array | None, x: jax.Array, B: jax.Array) -> jax.Array:
    shape = (B.shape[2], x.shape[1] * x.shape[2])
    return jnp.zeros(shape, F32) if initial is None else initial.astype(F32)


def _by_channel(step: Callable[..., Step], head_dim: Callable[..., int]) -> Callable[..., Step]:
    """The same step with a state [N, H * P] instead of [H, N, P]."""

    def run(state: jax.Array, *operands: jax.Array) -> Step:
        size = state.shape[0]
        heads = jnp.swapaxes(state.reshape(size, -1, head_dim(*operands)), 0, 1)
        out, new = step(heads, *operands)
        return out, jnp.swapaxes(new, 0, 1).reshape(size, -1)

    return run


RECURRENCE = Recurrence(
    _by_channel(gla.RECURRENCE.token, lambda q, k, v, g: v.shape[-1]),
    gla.RECURRENCE.within,
    _by_channel(gla.RECURRENCE.across, lambda q, k, kept, v, scores: v.shape[-1]),
)


def step_size(dt: jax.Array, dt_bias: jax.Array | None, dt_limit: tuple[float, float]) -> jax.Array:
    """f32[T, H]: clamp(softplus(dt + dt_bias))."""
    dt = dt.astype(F32)
    if dt_bias is not None:
        dt = dt + dt_bias.astype(F32)[None]
    return jnp.clip(jax.nn.softplus(dt), *dt_limit)


def add_skip(y: jax.Array, x: jax.Array, D: jax.Array | None) -> jax.Array:
    """y + D x [T, H, P] in the dtype of x."""
    if D is not None:
        y = y + D.astype(F32)[None, :, None] * x.astype(F32)
    return y.astype(x.dtype)
