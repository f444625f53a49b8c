"""Gated delta net (Yang et al. 2024): causal convolution, gated delta rule, gated output norm."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_jax.cache.arrays import StateCache, StateSlots
from hybrid_jax.layers.context import RopeTables, StepContext
from hybrid_jax.layers.linear import Linear, param
from hybrid_jax.layers.norm import gated_rms
from hybrid_jax.specs import GatedDeltaSpec
from pallas_kernels import causal_conv1d, gated_delta_rule


class GatedDeltaNet(nnx.Module):
    """One linear-attention layer. Channels of `in_proj_qkv` and of the convolution: q, k, v."""

    def __init__(
        self,
        hidden_size: int,
        spec: GatedDeltaSpec,
        *,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.spec = spec
        heads, value_size = spec.num_v_heads, spec.num_v_heads * spec.v_dim
        common = {"dtype": dtype, "rngs": rngs}
        # q, k and v are cut by different head counts, so their joint projection is not cut at all.
        self.in_proj_qkv = Linear(hidden_size, spec.conv_channels, axes=(None, "embed"), **common)
        self.in_proj_z = Linear(hidden_size, value_size, axes=("value_heads", "embed"), **common)
        self.in_proj_b = Linear(hidden_size, heads, axes=("value_heads", "embed"), **common)
        self.in_proj_a = Linear(hidden_size, heads, axes=("value_heads", "embed"), **common)
        self.conv_weight = param(rngs, (spec.conv_channels, spec.conv_width), (None, None), dtype)
        self.A_log = param(rngs, (heads,), ("value_heads",), jnp.float32)
        self.dt_bias = param(rngs, (heads,), ("value_heads",), jnp.float32)
        self.norm_weight = param(rngs, (spec.v_dim,), (None,), jnp.float32)
        self.out_proj = Linear(value_size, hidden_size, axes=("embed", "value_heads"), **common)

    def __call__(
        self, x: jax.Array, cache: StateCache, table: StateSlots, context: StepContext
    ) -> tuple[jax.Array, StateCache]:
        """One step. x [T, D] -> [T, D] and the cache with the rows' new states."""

        def convolve(x: jax.Array, *slots: Any) -> tuple[jax.Array, jax.Array]:
            weight = self.conv_weight[...]
            return causal_conv1d.causal_conv1d(x, weight, None, *slots, activation="silu")

        mixed, conv = context.slot_to_slot(convolve, (self.in_proj_qkv(x),), cache.conv, table)
        operands = (*self._split(mixed), *self._gates(x))
        out, recurrent = context.slot_to_slot(
            gated_delta_rule.gated_delta_rule, operands, cache.recurrent, table
        )
        return self._output(out, x), StateCache(conv, recurrent)

    def dense(self, x: jax.Array, rope: RopeTables, *, chunked: bool = False) -> jax.Array:
        """A whole sequence from position 0 without a cache: x [T, D] -> [T, D]. The oracle.

        Token by token, as the recurrence is defined; `chunked` uses the parallel form, for
        training.
        """
        del rope
        mixed = causal_conv1d.dense(self.in_proj_qkv(x), self.conv_weight[...], None, "silu")
        q, k, v = self._split(mixed)
        g, beta = self._gates(x)
        form = gated_delta_rule.chunked if chunked else gated_delta_rule.recurrent
        out, _ = form(q, k, v, g, beta)
        return self._output(out, x)

    def _split(self, mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """mixed [T, channels] -> q and k [T, Hk, dk], v [T, Hv, dv]."""
        spec, tokens = self.spec, mixed.shape[0]
        key_size = spec.num_k_heads * spec.k_dim
        q, k, v = jnp.split(mixed, (key_size, 2 * key_size), axis=-1)
        return (
            q.reshape(tokens, spec.num_k_heads, spec.k_dim),
            k.reshape(tokens, spec.num_k_heads, spec.k_dim),
            v.reshape(tokens, spec.num_v_heads, spec.v_dim),
        )

    def _gates(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Log decay g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), float32[T, Hv]."""
        a = self.in_proj_a(x).astype(jnp.float32)
        decay = jnp.exp(self.A_log[...].astype(jnp.float32))[None, :]
        g = -decay * jax.nn.softplus(a + self.dt_bias[...].astype(jnp.float32)[None, :])
        beta = jax.nn.sigmoid(self.in_proj_b(x).astype(jnp.float32))
        return g, 2.0 * beta if self.spec.allow_neg_eigval else beta

    def _output(self, out: jax.Array, x: jax.Array) -> jax.Array:
        z = self.in_proj_z(x).reshape(out.shape)
        normed = gated_rms(out, z, self.norm_weight[...], self.spec.norm_eps)
        return self.out_proj(normed.reshape(out.shape[0], -1).astype(x.dtype))
