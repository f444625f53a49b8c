"""The token-mixing half of a layer: one module per kind, chosen by the type of its spec."""

import jax
from flax import nnx

from hybrid_jax.layers.mixers.attention import Attention
from hybrid_jax.layers.mixers.gated_delta import GatedDeltaNet
from hybrid_jax.specs import AttentionSpec, GatedDeltaSpec, MixerSpec

MIXERS = {AttentionSpec: Attention, GatedDeltaSpec: GatedDeltaNet}


def build_mixer(
    hidden_size: int, spec: MixerSpec, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
) -> Attention | GatedDeltaNet:
    """The module for `spec`."""
    return MIXERS[type(spec)](hidden_size, spec, dtype=dtype, rngs=rngs)
