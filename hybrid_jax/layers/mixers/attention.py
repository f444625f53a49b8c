"""Softmax attention: grouped query heads, over everything before or over a sliding window."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybrid_jax.cache.arrays import PagedCache
from hybrid_jax.layers.context import RopeTables, StepContext
from hybrid_jax.layers.linear import Linear, param
from hybrid_jax.layers.norm import RMSNorm
from hybrid_jax.layers.rope import apply_rope
from hybrid_jax.specs import AttentionSpec
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.storage import LARGEST, value_dtype


class Attention(nnx.Module):
    """Projections, norms, rope and gate around the paged attention op."""

    def __init__(
        self,
        hidden_size: int,
        spec: AttentionSpec,
        *,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.spec = spec
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        q_out = 2 * q_size if spec.output_gate else q_size
        common = {"dtype": dtype, "rngs": rngs, "bias": spec.qkv_bias}
        self.q_proj = Linear(hidden_size, q_out, axes=("heads", "embed"), **common)
        self.k_proj = Linear(hidden_size, kv_size, axes=("kv_heads", "embed"), **common)
        self.v_proj = Linear(hidden_size, kv_size, axes=("kv_heads", "embed"), **common)
        self.o_proj = Linear(
            q_size,
            hidden_size,
            axes=("embed", "heads"),
            dtype=dtype,
            rngs=rngs,
            bias=spec.out_bias,
        )
        self.q_norm = _qk_norm(spec, q_size, rngs)
        self.k_norm = _qk_norm(spec, kv_size, rngs)
        self.sinks = param(rngs, (spec.num_heads,), ("heads",), jnp.float32) if spec.sinks else None

    def __call__(
        self, x: jax.Array, cache: PagedCache, table: jax.Array, context: StepContext
    ) -> tuple[jax.Array, PagedCache]:
        """One step. x [T, D], table i32[S, M] -> [T, D] and the cache with this step's K/V."""
        q, k, v, gate = self._project(x, context.rope)
        k_scale, v_scale = kv_scales(self.spec, cache.pages.dtype)
        out, pages = paged_attention(
            q,
            k,
            v,
            cache.pages,
            table,
            context.ragged,
            scale=self.spec.scale,
            window=self.spec.window,
            softcap=self.spec.softcap,
            sinks=None if self.sinks is None else self.sinks[...],
            k_scale=None if k_scale is None else jnp.asarray(k_scale),
            v_scale=None if v_scale is None else jnp.asarray(v_scale),
        )
        return self._output(out, gate), PagedCache(pages)

    def dense(self, x: jax.Array, rope: RopeTables, *, chunked: bool = False) -> jax.Array:
        """A whole sequence from position 0 without a cache: x [T, D] -> [T, D]. The oracle."""
        del chunked  # there is one form only
        q, k, v, gate = self._project(x, rope)
        sinks = None if self.sinks is None else self.sinks[...]
        return self._output(dense_attention(q, k, v, self.spec, sinks), gate)

    def _project(
        self, x: jax.Array, rope: RopeTables
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """q [T, N, H], k and v [T, K, H], gate [T, N, H] or None."""
        spec, tokens = self.spec, x.shape[0]
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        gate = None
        if spec.output_gate:
            q, gate = jnp.split(q.reshape(tokens, spec.num_heads, 2 * spec.head_dim), 2, axis=-1)
        if self.q_norm and self.k_norm and spec.qk_norm_width == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.reshape(tokens, spec.num_heads, spec.head_dim)
        k = k.reshape(tokens, spec.num_kv_heads, spec.head_dim)
        v = v.reshape(tokens, spec.num_kv_heads, spec.head_dim)
        if self.q_norm and self.k_norm and spec.qk_norm_width == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if spec.rope is not None:
            cos, sin = rope[spec.rope]
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        return q, k, v, gate

    def _output(self, out: jax.Array, gate: jax.Array | None) -> jax.Array:
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return self.o_proj(out.reshape(out.shape[0], -1))


def _qk_norm(spec: AttentionSpec, size: int, rngs: nnx.Rngs) -> RMSNorm | None:
    if spec.qk_norm is None:
        return None
    width = spec.head_dim if spec.qk_norm_width == "head" else size
    return RMSNorm(width, spec.qk_norm, rngs=rngs)


def kv_scales(
    spec: AttentionSpec, pages: jax.typing.DTypeLike
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """f32[K] of K and of V in `pages` of a dtype, None for 1: ranges reach its largest value."""
    largest = LARGEST.get(value_dtype(pages))
    k, v = (
        np.asarray(ends, np.float32) / np.float32(largest) if ends and largest else None
        for ends in (spec.k_range, spec.v_range)
    )
    return k, v


def dense_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, sinks: jax.Array | None
) -> jax.Array:
    """Causal attention of one sequence, the whole score matrix at once, in float32.

    q [T, N, H], k and v [T, K, H], sinks float32[N] -> [T, N, H] in the dtype of q.
    """
    tokens, heads, dim = q.shape
    grouped = q.reshape(tokens, spec.num_kv_heads, heads // spec.num_kv_heads, dim)
    scores = spec.scale * jnp.einsum(
        "tkgh,skh->kgts", grouped.astype(jnp.float32), k.astype(jnp.float32)
    )
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    query, key = jnp.arange(tokens)[:, None], jnp.arange(tokens)[None, :]
    visible = key <= query
    if spec.window is not None:
        visible &= key > query - spec.window
    scores = jnp.where(visible[None, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    sink = None if sinks is None else sinks.reshape(spec.num_kv_heads, -1, 1, 1)
    if sink is not None:
        top = jnp.maximum(top, sink)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    out = jnp.einsum("kgts,skh->tkgh", weights / total, v.astype(jnp.float32))
    return out.reshape(tokens, heads, dim).astype(q.dtype)
