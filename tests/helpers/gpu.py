"""Compiles for NVIDIA GPUs that are not there: XLA needs its CUDA plugin and a description."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import pytest
from jax.experimental import topologies

from tests.helpers.tpu import compile_on

KIB = 1 << 10


class Gpu(NamedTuple):
    """What the compiler asks about a GPU."""

    kind: str  # as the runtime names it
    capability: tuple[int, int]
    processors: int
    shared_memory: int  # bytes of a multiprocessor; a block may have 1 KiB less

    @property
    def target_config(self) -> str:
        """A `stream_executor.GpuTargetConfigProto` in text form."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              shared_memory_per_block: {48 * KIB} shared_memory_per_core: {self.shared_memory}
              shared_memory_per_block_optin: {self.shared_memory - KIB}
              core_count: {self.processors} fpus_per_core: 128
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              memory_bandwidth: 2000000000000 l2_cache_size: {40 << 20} clock_rate_ghz: 1.4
              device_memory_size: {80 << 30}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
            }}
            platform_name: "CUDA"
            runtime_version {{ major: 13 }}
            dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.kind}"
        """


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 164 * KIB),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 228 * KIB),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 228 * KIB),
}
# All of them, of which the fast tier compiles for one.
EVERY_GPU = [
    name if name == "h100" else pytest.param(name, marks=pytest.mark.slow) for name in GPUS
]

needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="jax-cuda13-plugin, the GPU's compiler, is not installed; it needs no GPU, only Linux",
)


def compile_for(
    chip: str, fn: Callable[..., Any], args: Sequence[Any], donate: Sequence[int] = ()
) -> jax.stages.Compiled:
    """`fn` compiled for one GPU, kernels selected for it. `args` are shapes.

    A kernel that spills registers is an error.
    """
    config = GPUS[chip].target_config
    topology = topologies.get_topology_desc(
        chip, platform="cuda", topology="1x1x1", target_config=config
    )
    options = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    return compile_on("gpu", topology.devices[0], fn, args, donate, options)
