"""The gated delta net as separate ops, each of which chooses its own implementation.

The definition of correct where those run their references, and the path wherever no kernel takes
all of it.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.causal_conv1d import causal_conv1d
from pallas_kernels.gated_delta_net.operands import States, Weights
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32


def gates(
    a: jax.Array, b: jax.Array, weights: Weights, *, allow_neg_eigval: bool
) -> tuple[jax.Array, jax.Array]:
    """Log decay g = -exp(A_log) softplus(a + dt_bias), and beta = sigmoid(b).

    Args:
        a: [T, Hv] or, with a decay per key channel, [T, Hv, dk].
        b: [T, Hv].
        weights: of which `A_log` and `dt_bias` are used.
        allow_neg_eigval: beta is doubled (Grazzi et al. 2024).

    Returns:
        g and beta in float32, shaped as a and b.
    """
    decay = jnp.exp(weights.A_log).reshape(1, -1, *[1] * (a.ndim - 2))
    g = -decay * jax.nn.softplus(a.astype(F32) + weights.dt_bias[None])
    beta = jax.nn.sigmoid(b.astype(F32))
    return g, 2.0 * beta if allow_neg_eigval else beta


def split(
    channels: jax.Array, k_heads: int, state_shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Channels [T, C] -> q and k [T, Hk, dk], v [T, Hv, dv]; states are [..., Hv, dk, dv]."""
    tokens = channels.shape[0]
    v_heads, dk, dv = state_shape[-3:]
    q, k, v = jnp.split(channels, (k_heads * dk, 2 * k_heads * dk), axis=-1)
    q, k = (x.reshape(tokens, k_heads, dk) for x in (q, k))
    return q, k, v.reshape(tokens, v_heads, dv)


def gated_delta_net(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    state: States,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    weights: Weights,
    k_heads: int,
    allow_neg_eigval: bool,
) -> tuple[jax.Array, States]:
    """See `api.gated_delta_net`."""
    rows = ragged, read_slots, write_slots
    mixed, conv = causal_conv1d(
        qkv, weights.conv, weights.conv_bias, state.conv, *rows, activation="silu"
    )
    q, k, v = split(mixed, k_heads, state.recurrent.shape)
    g, beta = gates(a, b, weights, allow_neg_eigval=allow_neg_eigval)
    out, recurrent = gated_delta_rule(q, k, v, g, beta, state.recurrent, *rows)
    return out, States(conv, recurrent)
