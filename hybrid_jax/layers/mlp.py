"""Gated feed-forward: SwiGLU and GeGLU (Shazeer 2020)."""

from functools import partial

import jax
from flax import nnx

from hybrid_jax.layers.linear import Linear
from hybrid_jax.specs import Activation, MLPSpec

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
}


def gated(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """act(gate) * up, computed in the dtype of the operands."""
    return ACTIVATIONS[activation](gate) * up


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(
        self, hidden_size: int, spec: MLPSpec, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.activation: Activation = spec.activation
        size = spec.intermediate_size
        into = {"axes": ("ffn", "embed"), "dtype": dtype, "rngs": rngs}
        self.gate_proj = Linear(hidden_size, size, **into)
        self.up_proj = Linear(hidden_size, size, **into)
        self.down_proj = Linear(size, hidden_size, axes=("embed", "ffn"), dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, D] -> [T, D]."""
        hidden = gated(self.gate_proj.float32(x), self.up_proj.float32(x), self.activation)
        return self.down_proj(hidden.astype(x.dtype))
