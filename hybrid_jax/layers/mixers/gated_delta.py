"""Gated delta net (Yang et al. 2024): causal convolution, gated delta rule, gated output norm."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_jax.cache.arrays import StateCache, StateSlots
from hybrid_jax.layers.context import RopeTables, StepContext
from hybrid_jax.layers.linear import Linear, param
from hybrid_jax.layers.norm import gated_rms
from hybrid_jax.specs import GatedDeltaSpec
from pallas_kernels import causal_conv1d, gated_delta_net, gated_delta_rule


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
        net = functools.partial(
            gated_delta_net.gated_delta_net,
            weights=self._weights(),
            k_heads=self.spec.num_k_heads,
            allow_neg_eigval=self.spec.allow_neg_eigval,
        )
        tokens = self.in_proj_qkv(x), self.in_proj_a(x), self.in_proj_b(x)
        state = gated_delta_net.States(cache.conv, cache.recurrent)
        out, state = context.slot_to_slot(net, tokens, state, table)
        return self._output(out, x), StateCache(*state)

    def dense(self, x: jax.Array, rope: RopeTables, *, chunked: bool = False) -> jax.Array:
        """A whole sequence from position 0 without a cache: x [T, D] -> [T, D]. The oracle.

        Token by token, as the recurrence is defined; `chunked` uses the parallel form, for
        training.
        """
        del rope
        spec, weights = self.spec, self._weights()
        mixed = causal_conv1d.dense(self.in_proj_qkv(x), weights.conv, None, "silu")
        state_shape = (spec.num_v_heads, spec.k_dim, spec.v_dim)
        q, k, v = gated_delta_net.split(mixed, spec.num_k_heads, state_shape)
        g, beta = gated_delta_net.gates(
            self.in_proj_a(x), self.in_proj_b(x), weights, allow_neg_eigval=spec.allow_neg_eigval
        )
        form = gated_delta_rule.chunked if chunked else gated_delta_rule.recurrent
        out, _ = form(q, k, v, g, beta)
        return self._output(out, x)

    def _weights(self) -> gated_delta_net.Weights:
        conv, A_log, dt_bias = self.conv_weight[...], self.A_log[...], self.dt_bias[...]
        return gated_delta_net.Weights(conv, None, A_log, dt_bias)

    def _output(self, out: jax.Array, x: jax.Array) -> jax.Array:
        z = self.in_proj_z(x).reshape(out.shape)
        normed = gated_rms(out, z, self.norm_weight[...], self.spec.norm_eps)
        return self.out_proj(normed.reshape(out.shape[0], -1).astype(x.dtype))
