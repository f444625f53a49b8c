"""What belongs to one layer: its weights, and the pools of what it remembers."""

from typing import NamedTuple

import jax


class Weights(NamedTuple):
    """Of a layer with C = H P + 2 G N channels and a convolution over W tokens."""

    conv: jax.Array  # [C, W]; the last tap multiplies the current token
    conv_bias: jax.Array | None  # [C]
    A_log: jax.Array  # f32[H]
    D: jax.Array  # f32[H] of the skip
    dt_bias: jax.Array  # f32[H]


class States(NamedTuple):
    """Two pools with the same slots. Donate them to the surrounding jit to update them in place."""

    conv: jax.Array  # [slots, W - 1, C / n, n], as `causal_conv1d.state_shape` says
    recurrent: jax.Array  # f32[slots, N, H * P]
