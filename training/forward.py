"""The forward pass that is trained: the library's own dense one, so training tests it as well."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import jax

Tensors = dict[str, jax.Array]  # by hub name
Forward = Callable[[Tensors, jax.Array], jax.Array]  # (tensors, tokens [B, T]) -> logits [B, T, V]


def make_forward(config: dict) -> Forward:
    """The library's dense forward over hub-named tensors, differentiable in the tensors."""
    from hybrid_jax.generate import dense_forward

    from hybrid_jax.models import params_from_hub

    def forward(tensors: Tensors, tokens: jax.Array) -> jax.Array:
        return dense_forward(params_from_hub(config, tensors), tokens)

    return forward


def load_forward(spec: str, config: dict) -> Forward:
    """Resolve `module:factory` and build the forward pass of `config` with it."""
    module, _, factory = spec.partition(":")
    return getattr(importlib.import_module(module), factory)(config)
