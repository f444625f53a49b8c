"""The token-mixing half of a layer: one module per kind, chosen by the type of its spec."""

from typing import Any, Protocol

import jax
from flax import nnx

from hybrid_jax.layers.context import RopeTables, StepContext
from hybrid_jax.layers.mixers.attention import Attention
from hybrid_jax.layers.mixers.gated_delta import GatedDeltaNet
from hybrid_jax.specs import AttentionSpec, GatedDeltaSpec, MixerSpec


class Mixer(Protocol):
    """What a layer asks of its mixer. Each kind takes its own cache and table (see `Carry`)."""

    def __call__(
        self, x: jax.Array, cache: Any, table: Any, context: StepContext
    ) -> tuple[jax.Array, Any]:
        """One step: x [T, D] -> [T, D] and the updated cache."""
        ...

    def dense(self, x: jax.Array, rope: RopeTables, *, chunked: bool = False) -> jax.Array:
        """A whole sequence from position 0 without a cache: x [T, D] -> [T, D]."""
        ...


MIXERS = {AttentionSpec: Attention, GatedDeltaSpec: GatedDeltaNet}


def build_mixer(
    hidden_size: int, spec: MixerSpec, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
) -> Mixer:
    """The module for `spec`."""
    return MIXERS[type(spec)](hidden_size, spec, dtype=dtype, rngs=rngs)
