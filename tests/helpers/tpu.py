"""Compiles for TPUs that are not there: libtpu is the compiler, a topology stands for devices."""

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import platform

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
# An instruction of an optimised module: name = type opcode(
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", re.MULTILINE)
_FREE = {"parameter", "custom-call", "get-tuple-element", "tuple", "bitcast"}

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install 'hybrid-jax[tpu]' compiles without a device",
)


def compile_for(
    chip: str, fn: Callable[..., Any], args: Sequence[Any], donate: Sequence[int] = ()
) -> jax.stages.Compiled:
    """`fn` compiled for one device of `chip`, kernels selected for it. `args` are shapes."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # its lock guards devices; none here
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    device = topology.devices[0]
    mesh = Mesh(np.array([device]), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tuple(args)
    )
    with (
        platform.target("tpu", device.device_kind),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        return jax.jit(fn, donate_argnums=tuple(donate)).lower(*placed).compile()


def check_in_place(
    compiled: jax.stages.Compiled, pool: jax.ShapeDtypeStruct, kernels: Sequence[str]
) -> None:
    """The kernels run, nothing else makes an array as large as `pool`, and `pool` is aliased."""
    size = int(np.prod(pool.shape))
    makers = set()
    text = compiled.as_text()
    missing = [name for name in kernels if not re.search(rf"%{name}[.\d]* = .*custom-call", text)]
    assert not missing, f"not in the module: {missing}"
    for types, opcode in _INSTRUCTION.findall(text):
        for dims in re.findall(r"\w+\[([\d,]+)\]", types):
            if np.prod([int(n) for n in dims.split(",")]) >= size:
                makers.add(opcode)
    assert makers <= _FREE, f"pool-sized results of {makers - _FREE}"
    memory = compiled.memory_analysis()
    assert memory is not None
    num_bytes = size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes >= num_bytes
    assert memory.temp_size_in_bytes < num_bytes / 2
