"""The one decoder that all families share. A family differs by its specs, not by its code."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_jax.cache.arrays import LayerCache, StateSlots
from hybrid_jax.config import ModelConfig
from hybrid_jax.layers.context import RopeTables, StepContext, rope_tables
from hybrid_jax.layers.linear import Embedding, Linear
from hybrid_jax.layers.mixers import build_mixer
from hybrid_jax.layers.mlp import GatedMLP
from hybrid_jax.layers.moe import SparseMoE
from hybrid_jax.layers.norm import RMSNorm
from hybrid_jax.specs import LayerSpec, MoESpec


class DecoderLayer(nnx.Module):
    """x += mixer, x += ffn, with norms before, after or on both sides (`LayerSpec.layout`)."""

    def __init__(
        self,
        hidden_size: int,
        spec: LayerSpec,
        *,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.mixer = build_mixer(hidden_size, spec.mixer, dtype=dtype, rngs=rngs)
        self.ffn = (
            SparseMoE(hidden_size, spec.ffn, dtype=dtype, rngs=rngs)
            if isinstance(spec.ffn, MoESpec)
            else GatedMLP(hidden_size, spec.ffn, dtype=dtype, rngs=rngs)
        )
        before, after = spec.layout != "post", spec.layout != "pre"

        def norm(wanted: bool) -> RMSNorm | None:
            return RMSNorm(hidden_size, spec.norm, rngs=rngs) if wanted else None

        self.pre_mixer_norm, self.post_mixer_norm = norm(before), norm(after)
        self.pre_ffn_norm, self.post_ffn_norm = norm(before), norm(after)

    def __call__(
        self,
        x: jax.Array,
        cache: LayerCache,
        table: jax.Array | StateSlots,
        context: StepContext,
    ) -> tuple[jax.Array, LayerCache]:
        """One step: x [T, D] -> [T, D] and the layer's cache."""
        y = _norm(self.pre_mixer_norm, x)
        with jax.named_scope("mixer"):
            y, cache = self.mixer(y, cache, table, context)
        x = x + _norm(self.post_mixer_norm, y)
        y = _norm(self.pre_ffn_norm, x)
        with jax.named_scope("ffn"):
            y = self.ffn(y)
        return x + _norm(self.post_ffn_norm, y), cache

    def dense(self, x: jax.Array, rope: RopeTables, *, chunked: bool = False) -> jax.Array:
        """A whole sequence without a cache: x [T, D] -> [T, D]."""
        y = self.mixer.dense(_norm(self.pre_mixer_norm, x), rope, chunked=chunked)
        x = x + _norm(self.post_mixer_norm, y)
        ffn = self.ffn.dense if isinstance(self.ffn, SparseMoE) else self.ffn
        return x + _norm(self.post_ffn_norm, ffn(_norm(self.pre_ffn_norm, x)))


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head. Caches are arguments and results."""

    def __init__(self, config: ModelConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [
                DecoderLayer(config.hidden_size, spec, dtype=dtype, rngs=rngs)
                for spec in config.layers
            ]
        )
        self.norm = RMSNorm(config.hidden_size, config.final_norm, rngs=rngs)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(
                config.hidden_size,
                config.vocab_size,
                axes=("vocab", "embed"),
                dtype=dtype,
                rngs=rngs,
            )
        )

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        caches: tuple[LayerCache, ...],
        tables: tuple[jax.Array | StateSlots, ...],
        context: StepContext,
        *,
        on_layer: Callable[[int, jax.Array], None] = lambda count, hidden: None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """One step.

        Args:
            token_ids: i32[T]. positions: i32[T].
            caches: one per layer. tables: one per layer (the table of its cache group).
            context: row boundaries; its rope tables are filled here.
            on_layer: called with the hidden states [T, D] after 0, 1, ... layers.

        Returns:
            Hidden states [T, D] before the final norm, and the caches.
        """
        with jax.named_scope("rope"):
            context = replace(context, rope=rope_tables(self.config.layers, positions))
        x = self._embed(token_ids)
        updated = []
        on_layer(0, x)
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}_{self.config.layers[i].kind}"):
                x, cache = layer(x, caches[i], tables[i], context)
            updated.append(cache)
            on_layer(i + 1, x)
        return x, tuple(updated)

    def dense(self, token_ids: jax.Array, *, chunked: bool = False) -> jax.Array:
        """A whole sequence from position 0 without caches: i32[T] -> hidden states [T, D]."""
        rope = rope_tables(self.config.layers, jnp.arange(token_ids.shape[0], dtype=jnp.int32))
        x = self._embed(token_ids)
        for layer in self.layers:
            x = layer.dense(x, rope, chunked=chunked)
        return x

    @jax.named_scope("head")
    def logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., D] before the final norm -> float32 logits [..., V]."""
        x = self.norm(hidden)
        logits = self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head.float32(x)
        if self.config.logit_softcap is not None:
            cap = self.config.logit_softcap
            logits = cap * jnp.tanh(logits / cap)
        return logits

    @jax.named_scope("embed")
    def _embed(self, token_ids: jax.Array) -> jax.Array:
        x = self.embed_tokens(token_ids)
        if self.config.embed_scale == 1.0:
            return x
        # Gemma multiplies by the scale rounded to the activation dtype.
        return x * jnp.asarray(self.config.embed_scale, x.dtype)


def _norm(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


Params = dict[str, jax.Array]
"""Parameter path ("layers.0.mixer.q_proj.weight") -> array."""


def abstract_params(
    config: ModelConfig, dtype: jax.typing.DTypeLike
) -> tuple[Any, dict[str, jax.ShapeDtypeStruct], dict[str, tuple[str | None, ...]]]:
    """The model without memory: its nnx graph, and per path the shape and the logical axes."""
    model = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    flat = {_path(p): v for p, v in nnx.to_flat_state(state)}
    shapes = {p: jax.ShapeDtypeStruct(v.shape, v.dtype) for p, v in flat.items()}
    return graph, shapes, {p: v.axes for p, v in flat.items()}


def bind(graph: Any, params: Params) -> Decoder:
    """A callable model over `params`; free of charge under jit."""
    keys = [
        (tuple(int(k) if k.isdigit() else k for k in p.split(".")), v) for p, v in params.items()
    ]
    return nnx.merge(graph, nnx.from_flat_state(sorted(keys, key=lambda item: _sort_key(item[0]))))


def _path(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _sort_key(path: tuple[Any, ...]) -> tuple[tuple[bool, Any], ...]:
    return tuple((isinstance(k, str), k) for k in path)
