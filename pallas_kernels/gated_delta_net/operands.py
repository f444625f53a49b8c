"""What belongs to one layer: its weights, and the pools of what it remembers."""

from typing import NamedTuple

import jax


class Weights(NamedTuple):
    """Of a layer with C = 2 Hk dk + Hv dv channels and a convolution over W tokens."""

    conv: jax.Array  # [C, W]; the last tap multiplies the current token
    conv_bias: jax.Array | None  # [C]
    A_log: jax.Array  # f32[Hv]
    dt_bias: jax.Array  # f32[Hv]; with a decay per key channel f32[Hv, dk]


class States(NamedTuple):
    """Two pools with the same slots. Donate them to the surrounding jit to update them in place."""

    conv: jax.Array  # [slots, W - 1, C / n, n], as `causal_conv1d.state_shape` says
    recurrent: jax.Array  # [slots, Hv, dk, dv]
