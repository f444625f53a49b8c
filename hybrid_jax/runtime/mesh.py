"""From logical axis names to shardings over a one-dimensional mesh."""

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from hybrid_jax.config import ModelConfig
from hybrid_jax.specs import AttentionSpec, CacheSpec, LayerSpec, MLPSpec, StateSpec
from pallas_kernels.paged_attention import pages_shape

AXIS = "tensor"


def make_mesh(tensor_parallel_size: int) -> jax.sharding.Mesh | None:
    """A mesh over the first devices; None for one device.

    Raises:
        ValueError: there are fewer devices than asked for.
    """
    if tensor_parallel_size == 1:
        return None
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} needs as many devices but there are "
            f"{len(devices)}; on CPU set XLA_FLAGS=--xla_force_host_platform_device_count="
            f"{tensor_parallel_size}"
        )
    return jax.sharding.Mesh(np.array(devices[:tensor_parallel_size]), (AXIS,))


def abstract_mesh(tensor_parallel_size: int) -> AbstractMesh:
    """A mesh of devices that need not be here; XLA's partitioner decides what is not said."""
    return AbstractMesh((tensor_parallel_size,), (AXIS,), axis_types=(AxisType.Auto,))


@dataclass(frozen=True)
class Partitioner:
    """Cuts an axis over the mesh when the units it is made of (heads, experts, ...) divide evenly.

    Axes that do not divide are replicated: every device computes all of them, which is exact.
    """

    model: ModelConfig
    mesh: jax.sharding.Mesh | AbstractMesh

    def parameter(self, path: str, axes: tuple[str | None, ...]) -> NamedSharding:
        """The sharding of a parameter with logical `axes`."""
        units = {"vocab": self.model.vocab_size}
        if path.startswith("layers."):
            units |= layer_units(self.model.layers[int(path.split(".")[1])])
            if ".shared_expert." in path:
                units["ffn"] = _shared_size(self.model.layers[int(path.split(".")[1])])
        return self._sharding(axes, units)

    def cache(
        self, spec: CacheSpec, shape: tuple[int, ...], axes: tuple[str | None, ...]
    ) -> NamedSharding:
        """The sharding of a cache array of a layer with `spec`."""
        if isinstance(spec, StateSpec):
            heads = {a.name: a.shape[0] for a in spec.arrays}["recurrent"]
            return self._sharding(axes, {"value_heads": heads})
        # Pages with rows that belong to no head cannot be cut by head.
        cuts_by_head = shape[axes.index("kv_heads")] % spec.num_kv_heads == 0
        return self._sharding(axes, {"kv_heads": spec.num_kv_heads} if cuts_by_head else {})

    @property
    def replicated(self) -> NamedSharding:
        """On every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def refusals(self) -> list[str]:
        """One line for each axis that is replicated because it does not divide, and for pages."""
        size, seen = self.mesh.size, {}
        for layer in self.model.layers:
            for name, count in layer_units(layer).items():
                if count % size:
                    seen[f"{count} {name} do not divide by {size}: replicated"] = None
            if isinstance(layer.mixer, AttentionSpec):
                heads = layer.mixer.num_kv_heads
                if heads % size == 0 and _rows_of_a_token(layer.mixer) % heads:
                    reason = "on this device they have rows of no head"
                    seen[f"pages of {heads} kv_heads, {reason}: replicated"] = None
        if self.model.vocab_size % size:
            seen[f"{self.model.vocab_size} vocab do not divide by {size}: replicated"] = None
        return list(seen)

    def _sharding(self, axes: tuple[str | None, ...], units: dict[str, int]) -> NamedSharding:
        size = self.mesh.size
        cut = [AXIS if axis in units and units[axis] % size == 0 else None for axis in axes]
        return NamedSharding(self.mesh, PartitionSpec(*cut))


def layer_units(layer: LayerSpec) -> dict[str, int]:
    """How many units each logical axis of a layer has."""
    units: dict[str, int] = {}
    if isinstance(layer.mixer, AttentionSpec):
        units |= {"heads": layer.mixer.num_heads, "kv_heads": layer.mixer.num_kv_heads}
    else:
        units["value_heads"] = layer.mixer.num_v_heads
    if isinstance(layer.ffn, MLPSpec):
        units["ffn"] = layer.ffn.intermediate_size
    else:
        units["experts"] = layer.ffn.num_experts
    return units


def _rows_of_a_token(attention: AttentionSpec) -> int:
    return pages_shape(1, 1, attention.num_kv_heads, attention.head_dim)[2]


def _shared_size(layer: LayerSpec) -> int:
    return getattr(layer.ffn, "shared_intermediate_size", 0)
