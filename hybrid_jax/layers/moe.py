"""Mixture of experts: softmax over all experts, top-k, plus an optional shared expert."""

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_jax.layers.linear import Linear, matmul, param
from hybrid_jax.layers.mlp import GatedMLP, gated
from hybrid_jax.specs import MLPSpec, MoESpec


class SparseMoE(nnx.Module):
    """sum over the chosen experts of weight * expert(x), plus the shared expert.

    Expert weights are stacked: `gate_up` [E, 2F, D] (gate rows first) and `down` [E, D, F].
    """

    def __init__(
        self, hidden_size: int, spec: MoESpec, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.spec = spec
        experts, size = spec.num_experts, spec.intermediate_size
        self.router = Linear(hidden_size, experts, axes=(None, "embed"), dtype=dtype, rngs=rngs)
        self.gate_up = param(
            rngs, (experts, 2 * size, hidden_size), ("experts", None, "embed"), dtype
        )
        self.down = param(rngs, (experts, hidden_size, size), ("experts", "embed", None), dtype)
        shared = MLPSpec(spec.shared_intermediate_size, spec.activation)
        self.shared_expert = (
            GatedMLP(hidden_size, shared, dtype=dtype, rngs=rngs)
            if spec.shared_intermediate_size
            else None
        )
        self.shared_gate = (
            Linear(hidden_size, 1, axes=(None, "embed"), dtype=dtype, rngs=rngs)
            if spec.shared_gate
            else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, D] -> [T, D]; the cost follows the chosen experts."""
        weights, experts = self.route(x)
        routed = grouped_experts(x, weights, experts, self.gate_up[...], self.down[...], self.spec)
        return (routed + self._shared(x)).astype(x.dtype)

    def dense(self, x: jax.Array) -> jax.Array:
        """The same by running every expert on every token: the oracle, and differentiable."""
        weights, experts = self.route(x)
        one_hot = jax.nn.one_hot(experts, self.spec.num_experts, dtype=jnp.float32)  # [T, k, E]
        per_expert = jnp.einsum("tk,tke->te", weights, one_hot)
        hidden = jnp.einsum("td,efd->tef", x, self.gate_up[...], preferred_element_type=jnp.float32)
        gate, up = jnp.split(hidden, 2, axis=-1)
        hidden = gated(gate, up, self.spec.activation).astype(x.dtype)
        out = jnp.einsum("tef,edf->ted", hidden, self.down[...], preferred_element_type=jnp.float32)
        routed = jnp.einsum("ted,te->td", out, per_expert)
        return (routed + self._shared(x)).astype(x.dtype)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights float32[T, k] and expert ids i32[T, k] of each token."""
        probs = jax.nn.softmax(self.router.float32(x), axis=-1)
        weights, experts = jax.lax.top_k(probs, self.spec.top_k)
        if self.spec.renormalize:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights.astype(x.dtype).astype(jnp.float32), experts

    def _shared(self, x: jax.Array) -> jax.Array:
        if self.shared_expert is None:
            return jnp.zeros(x.shape, jnp.float32)
        shared = self.shared_expert(x).astype(jnp.float32)
        if self.shared_gate is not None:
            shared = shared * jax.nn.sigmoid(self.shared_gate.float32(x))
        return shared


def grouped_experts(
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    spec: MoESpec,
) -> jax.Array:
    """Runs each expert on its own tokens only.

    (token, choice) pairs are sorted by expert and cut into blocks of one expert each; a loop of as
    many turns as there are blocks reads one expert's weights a turn. XLA:CPU lowers
    `lax.ragged_dot` to a product over all experts, which is hundreds of times slower.

    Args:
        x: [T, D]. weights: float32[T, k]. experts: i32[T, k].
        gate_up: [E, 2F, D]. down: [E, D, F].

    Returns:
        float32[T, D].
    """
    tokens, k = experts.shape
    pairs = tokens * k
    block = _block_size(pairs, spec.num_experts)
    flat = experts.reshape(pairs)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.zeros(spec.num_experts, jnp.int32).at[flat].add(1)
    starts = jnp.cumsum(sizes) - sizes
    blocks = (sizes + block - 1) // block
    last_block = jnp.cumsum(blocks)
    flat_weights = weights.reshape(pairs)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last_block, i, side="right").astype(jnp.int32)
        first = starts[expert] + (i - (last_block[expert] - blocks[expert])) * block
        index = first + jnp.arange(block, dtype=jnp.int32)
        valid = index < starts[expert] + sizes[expert]
        pair = order[jnp.minimum(index, pairs - 1)]
        rows = pair // k
        hidden = matmul(x[rows], jax.lax.dynamic_index_in_dim(gate_up, expert, keepdims=False))
        gate, up = jnp.split(hidden, 2, axis=-1)
        hidden = gated(gate, up, spec.activation).astype(x.dtype)
        y = matmul(hidden, jax.lax.dynamic_index_in_dim(down, expert, keepdims=False))
        y = jnp.where(valid[:, None], y * flat_weights[pair][:, None], 0.0)
        return out.at[rows].add(y)

    return jax.lax.fori_loop(0, last_block[-1], body, jnp.zeros(x.shape, jnp.float32))


def _block_size(pairs: int, num_experts: int) -> int:
    """Tokens per block: about the mean load of an expert, a power of two in [2, 64]."""
    size = 2
    while size < 64 and size * num_experts < pairs:
        size *= 2
    return size
