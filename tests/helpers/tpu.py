"""Compiles for TPUs that are not there: libtpu is the compiler, a topology stands for devices."""

import importlib.machinery
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import platform
from tests.helpers.compiler import hasty

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
# All of them, of which the fast tier compiles for one.
EVERY_CHIP = [
    chip if chip == "v6e" else pytest.param(chip, marks=pytest.mark.slow) for chip in TOPOLOGIES
]
# An instruction of an optimised module: name = type opcode(
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", re.MULTILINE)
FREE = {"parameter", "custom-call", "get-tuple-element", "tuple", "bitcast"}
# Of a loop that updates an array in place.
LOOP = {"while", "dynamic-update-slice", "fusion"}

RACE = "RACE DETECTED"  # what the interpreter prints; it does not raise

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU's compiler, is not installed; it exists for Linux x86-64 only",
)


def pretend_libtpu(monkeypatch: pytest.MonkeyPatch, *, installed: bool) -> None:
    """Whether `importlib.util.find_spec` finds it."""
    find = importlib.util.find_spec
    found = importlib.machinery.ModuleSpec("libtpu", None) if installed else None
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: found if name == "libtpu" else find(name, *rest),
    )


def device_memory(mode: Literal["on_wait", "eager"]) -> pltpu.InterpretParams:
    """TPU memory: indices out of bounds raise, what was never written is NaN, slots are shared.

    The transfers of a pipeline run in order here, so races can only be seen between transfers that
    a kernel starts itself. Each of those needs a clock of its own.
    """
    return pltpu.InterpretParams(
        detect_races=True,
        vector_clock_size=64,
        dma_execution_mode=mode,
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
    )


def compile_for(
    chip: str, fn: Callable[..., Any], args: Sequence[Any], donate: Sequence[int] = ()
) -> jax.stages.Compiled:
    """`fn` compiled for one device of `chip`, kernels selected for it. `args` are shapes."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # its lock guards devices; none here
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    return compile_on("tpu", topology.devices[0], fn, args, donate)


def compile_on(
    name: str,
    device: Any,
    fn: Callable[..., Any],
    args: Sequence[Any],
    donate: Sequence[int],
    options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """`fn` compiled for a device of a topology, kernels selected for platform `name`. `options` are
    the compiler's.
    """
    mesh = Mesh(np.array([device]), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tuple(args)
    )
    with (
        platform.target(name, device.device_kind),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        hasty(False),
    ):
        return jax.jit(fn, donate_argnums=tuple(donate)).lower(*placed).compile(options)


def results(compiled: jax.stages.Compiled) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Opcode and dimensions of every array that an instruction of the module makes."""
    for types, opcode in _INSTRUCTION.findall(compiled.as_text()):
        for dims in re.findall(r"\w+\[([\d,]+)\]", types):
            yield opcode, tuple(int(n) for n in dims.split(","))


def count_calls(compiled: jax.stages.Compiled, kernel: str) -> int:
    """How often the module calls a kernel."""
    called = rf'%{kernel}[.\d_]* = .* custom-call\(| custom-call\(.*op_name="[^"]*/{kernel}/'
    return len(re.findall(called, compiled.as_text()))


def check_in_place(
    compiled: jax.stages.Compiled,
    pool: jax.ShapeDtypeStruct,
    kernels: Sequence[str],
    *,
    loop: bool = False,
) -> None:
    """The kernels run, nothing else makes an array as large as `pool`, and `pool` is aliased.

    `loop`: XLA updates it, too, in a loop. Small pools it would take to vector memory for that.
    """
    size = int(np.prod(pool.shape))
    missing = [name for name in kernels if not count_calls(compiled, name)]
    assert not missing, f"not in the module: {missing}"
    makers = {opcode for opcode, dims in results(compiled) if np.prod(dims) >= size}
    free = FREE | LOOP if loop else FREE
    assert makers <= free, f"pool-sized results of {makers - free}"
    memory = compiled.memory_analysis()
    assert memory is not None
    num_bytes = size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes >= num_bytes
    assert memory.temp_size_in_bytes < num_bytes / 2
