"""RMS norms. The variants differ in where the weight is applied and in which dtype."""

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_jax.layers.linear import param
from hybrid_jax.specs import NormSpec


def rms(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """RMS norm over the last axis (Zhang & Sennrich 2019), weight kept in float32."""

    def __init__(self, features: int, spec: NormSpec, *, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.weight = param(rngs, (features,), (None,), jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., features] -> the same shape and dtype."""
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        normed = rms(x, self.spec.eps)
        if self.spec.kind == "rms":
            return normed.astype(x.dtype) * weight.astype(x.dtype)
        if self.spec.kind == "rms1p":
            weight = weight + 1.0
        return (normed * weight).astype(x.dtype)


def gated_rms(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """rms(x) * weight * silu(gate) over the last axis: norm before gate. float32 in and out."""
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return rms(x, eps) * weight * jax.nn.silu(gate.astype(jnp.float32))
