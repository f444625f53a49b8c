"""The Mamba-2 mixer as separate ops, each of which chooses its own implementation.

The definition of correct where those run their references, and the path wherever no kernel takes
all of it.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.causal_conv1d import causal_conv1d
from pallas_kernels.mamba2.operands import States, Weights
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.ssd import ssd


def split(
    channels: jax.Array, heads: int, state_shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Channels [T, C] -> x [T, H, P], B and C [T, G, N]; states are [..., N, H * P]."""
    tokens = channels.shape[0]
    size, inner = state_shape[-2:]
    x, B, C = jnp.split(channels, (inner, (inner + channels.shape[1]) // 2), axis=-1)
    B, C = (w.reshape(tokens, -1, size) for w in (B, C))
    return x.reshape(tokens, heads, inner // heads), B, C


def mamba2(
    xBC: jax.Array,
    dt: jax.Array,
    state: States,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    weights: Weights,
    dt_limit: tuple[float, float],
) -> tuple[jax.Array, States]:
    """See `api.mamba2`."""
    rows = ragged, read_slots, write_slots
    mixed, conv = causal_conv1d(
        xBC, weights.conv, weights.conv_bias, state.conv, *rows, activation="silu"
    )
    x, B, C = split(mixed, dt.shape[1], state.recurrent.shape)
    y, recurrent = ssd(
        x, dt, -jnp.exp(weights.A_log), B, C, weights.D, weights.dt_bias, state.recurrent, *rows,
        dt_limit=dt_limit,
    )  # fmt: skip
    return y.reshape(y.shape[0], -1), States(conv, recurrent)
