"""The forward pass that is trained: the library's own dense one, so training tests it as well."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import jax

from hybrid_jax.generate import forward as dense_forward
from hybrid_jax.models import config_from_hf, params_from_hub
from hybrid_jax.models.decoder import abstract_params

Tensors = dict[str, jax.Array]  # by hub name
Forward = Callable[[Tensors, jax.Array], jax.Array]  # (tensors, tokens [B, T]) -> logits [B, T, V]


def make_forward(config: dict) -> Forward:
    """The library's dense forward over hub-named tensors, differentiable in the tensors."""
    model = config_from_hf(config)
    graph, _, _ = abstract_params(model, "float32")

    def forward(tensors: Tensors, tokens: jax.Array) -> jax.Array:
        return dense_forward(graph, params_from_hub(model, tensors), tokens, chunked=True)

    return forward


def load_forward(spec: str, config: dict) -> Forward:
    """Resolve `module:factory` and build the forward pass of `config` with it."""
    module, _, factory = spec.partition(":")
    return getattr(importlib.import_module(module), factory)(config)
