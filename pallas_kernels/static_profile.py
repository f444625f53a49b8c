"""Estimates what kernels take on a TPU that is not there, in cycles, by libtpu's static profile.

libtpu can follow the final instructions of a kernel through its grid and its loops, and sums up
what they and their transfers take. Three things it does not know:

- Values in scalar memory, which decide what a ragged batch makes the kernel do, are zeros to it.
  So the first grid step stores those of the batch there. What a kernel of many operands reads at
  a computed index is zero nevertheless: to what it reads, in the body and in the index maps, a
  vector of few straight lines is added instead.
- Transfers at the same time hold each other up. So no estimate is below the time of all bytes of
  operands and results, one after the other, at the rate of a long transfer in libtpu's model:
  `bench_operands` makes no pool larger than what a kernel uses.
- When to end: it may take any time and memory, and often aborts when the profile is written. So
  every kernel is compiled in a process of its own (`python -m pallas_kernels.static_profile`),
  with limits, and what counts is the file.
"""

import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import platform, tuning
from pallas_kernels.bench_operands import Batch, Call, cases_of, make_call

CPU_SECONDS = 300  # of one kernel, at most; most take 5
MOST_LINES = 8  # each is an instruction or two wherever the vector is read
WALL_SECONDS = 3600  # should it wait for ever
MEMORY_BYTES = 16 << 30  # of addresses, of which libtpu takes 3 GiB at once


class Target(NamedTuple):
    """A TPU with one core per device: the profile is one of a core."""

    kind: str  # as the runtime names it
    topology: str  # the smallest one that libtpu compiles for
    bytes_per_cycle: int  # of a long transfer, in libtpu's model
    megahertz: int  # at which its matrix units reach the published peak


TARGETS = {
    "v5e": Target("TPU v5 lite", "v5e:2x2", 491, 1500),
    "v6e": Target("TPU v6 lite", "v6e:2x2", 776, 1750),
    "tpu7x": Target("TPU7x", "tpu7x:2x2x1", 1688, 2200),
}


def find_target(chip: str) -> Target:
    """One of `TARGETS`.

    Raises:
        ValueError: there is no profile for this chip, or no libtpu on this machine.
    """
    if chip not in TARGETS:
        raise ValueError(
            f"there is no static profile for chip {chip!r}, only for {', '.join(TARGETS)}; for "
            "any other one run on the device itself, without --chip"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"compiling for {chip} needs libtpu, which is not installed; on Linux x86-64 "
            "pip install 'hybrid-jax[test]' brings it"
        )
    return TARGETS[chip]


@contextmanager
def targeting(chip: str) -> Iterator[None]:
    """Selects kernels for a chip; raises what `find_target` does."""
    with platform.target("tpu", find_target(chip).kind):
        yield


@dataclass(frozen=True)
class Trial:
    """A call of an op, with a block size to be tried if there is a key."""

    op: str
    case: str
    batch: Batch
    chip: str
    key: str = ""  # of the size, see `tuning.pick`
    size: int = 0


class Kernel(NamedTuple):
    """A kernel that a call runs."""

    body: Callable[..., Any]
    options: dict[str, Any]  # of `pl.pallas_call`
    operands: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def num_scalars(self) -> int:
        """How many of the operands lie in scalar memory; they come first."""
        return self.options["grid_spec"].num_scalar_prefetch

    @property
    def num_bytes(self) -> int:
        """Of all operands and results; of pools, which are updated in place, but for slot 0."""
        aliases = self.options.get("input_output_aliases", {})
        results = jax.tree.leaves(self.options["out_shape"])
        arrays = (*enumerate(self.operands), *enumerate(results, len(self.operands)))
        pools = {*aliases, *(len(self.operands) + result for result in aliases.values())}
        sizes = ((n, x.size * x.dtype.itemsize, x.shape[0]) for n, x in arrays)
        return sum(size - size // slots * (n in pools) for n, size, slots in sizes)

    @property
    def traced(self) -> str:
        """As text: where it is the same, so are the instructions."""
        return str(jax.make_jaxpr(pl.pallas_call(self.body, **self.options))(*self.operands))


def profile_sizes(
    call: Call, trial: Trial, sizes: Sequence[int]
) -> tuple[dict[int, int], dict[int, str]]:
    """Cycles of the kernels that a block size changes, by size; and why other sizes have none.

    Call it within `targeting`.

    Args:
        call: what is called, of `make_call`.
        trial: the same by name; its size does not matter.
        sizes: those to be compared.
    """
    kernels: dict[int, dict[str, Kernel]] = {}
    for size in sizes:
        with tuning.trying({trial.key: size}), _finding() as (kernels[size], _):
            # A fresh function: what was traced before would not be traced again.
            jax.eval_shape(lambda pool, given: call.run(pool, **given), call.pool, call.operands)
    first, *others = ({name: k.traced for name, k in found.items()} for found in kernels.values())
    changed = [name for name in first if any(other[name] != first[name] for other in others)]
    rate = TARGETS[trial.chip].bytes_per_cycle
    cycles, failed = {}, {}
    for size in sizes:
        one = Trial(trial.op, trial.case, trial.batch, trial.chip, trial.key, size)
        try:
            cycles[size] = sum(
                max(_profile(one, name), kernels[size][name].num_bytes // rate) for name in changed
            )
        except NoProfileError as error:
            failed[size] = str(error)
    return cycles, failed


@dataclass(frozen=True)
class Profile:
    """A kernel of a call, on a chip that need not be there."""

    case: str
    batch: Batch
    kernel: str
    cycles: int | None  # None: there is no profile, because of `failed`
    least: int  # cycles that its bytes take, one after the other
    failed: str = ""


def profile_kernels(call: Call, trial: Trial, cpu_seconds: int = CPU_SECONDS) -> list[Profile]:
    """Every kernel of a call, also one that finds no rows. Call it within `targeting`.

    Args:
        call: what is called, of `make_call`.
        trial: the same by name.
        cpu_seconds: of one kernel, at most.
    """
    with _finding() as (kernels, _):
        jax.eval_shape(lambda pool, given: call.run(pool, **given), call.pool, call.operands)
    profiles = []
    for name, kernel in kernels.items():
        cycles, failed = None, ""
        try:
            cycles = _profile(trial, name, cpu_seconds)
        except NoProfileError as error:
            failed = str(error)
        least = kernel.num_bytes // TARGETS[trial.chip].bytes_per_cycle
        profiles.append(Profile(trial.case, trial.batch, name, cycles, least, failed))
    return profiles


class NoProfileError(Exception):
    """Why there is none."""


def _profile(trial: Trial, kernel: str, cpu_seconds: int = CPU_SECONDS) -> int:
    """Cycles of one kernel, by a process that compiles it."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # what is found there is not compiled
        "TPU_SKIP_MDS_QUERY": "1",  # no metadata server to ask
        "TPU_LOG_DIR": "disabled",  # where failures would leave gigabytes
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # its lock guards devices; none here
    }
    command = [sys.executable, "-m", __spec__.name]
    command += [json.dumps(asdict(trial)), kernel, str(cpu_seconds)]
    with tempfile.TemporaryDirectory() as directory:
        environment["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_static_llo_profile_to={directory}"
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=WALL_SECONDS,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise NoProfileError(f"no profile within {WALL_SECONDS} s") from error
        for path in Path(directory).glob("*_static_llo_profile.textproto"):
            text = path.read_text()
            name = re.search(r'hlo_op_name: "([^".]*)', text)
            found = re.search(r"estimated_cycles: (\d+)", text)
            if name and found and name[1] == kernel:
                return int(found[1])
    said = r"^(?:\w+\.)*(\w*Error: .*)|(Static LLO profiling of \S+ failed: .*)"
    errors = ["".join(groups) for groups in re.findall(said, done.stderr, re.MULTILINE)]
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise NoProfileError(f"no profile within {cpu_seconds} s of CPU")
    raise NoProfileError(errors[-1][:200] if errors else "libtpu aborted without a profile")


@contextmanager
def _finding() -> Iterator[tuple[dict[str, Kernel], dict[str, tuple[jax.Array, ...]]]]:
    """Collects by name the kernels that are called within, which do not run, and their scalars."""
    kernels: dict[str, Kernel] = {}
    scalars: dict[str, tuple[jax.Array, ...]] = {}

    def pallas_call(body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def run(*operands: jax.Array) -> Any:
            shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
            kernel = kernels[options["name"]] = Kernel(body, options, shapes)
            scalars[options["name"]] = operands[: kernel.num_scalars]
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), options["out_shape"])

        return run

    original = pl.pallas_call
    pl.pallas_call = pallas_call
    try:
        yield kernels, scalars
    finally:
        pl.pallas_call = original


def _compile(trial: Trial, name: str) -> None:
    """Compiles a kernel of the call, which makes libtpu write its profile."""
    topology = TARGETS[trial.chip].topology
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    mesh = Mesh(np.array([device]), ("x",), axis_types=(AxisType.Auto,))
    case = next(case for case in cases_of(trial.op) if case.name == trial.case)
    with targeting(trial.chip), tuning.trying({trial.key: trial.size}):
        call = make_call(trial.op, case, trial.batch)
        with _finding() as (kernels, scalars):

            def trace(pool: Any, operands: dict[str, Any]) -> tuple[jax.Array, ...]:
                call.run(pool, **operands)
                return scalars[name]

            values = jax.jit(trace)(call.pool, call.operands)
    kernel = kernels[name]
    body, options = _with_scalars(kernel, [np.asarray(x) for x in values])
    donated = tuple(kernel.options.get("input_output_aliases", ()))
    run = jax.jit(pl.pallas_call(body, **options), donate_argnums=donated)
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in kernel.operands]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run.lower(*shapes).compile()


def _with_scalars(
    kernel: Kernel, values: Sequence[np.ndarray]
) -> tuple[Callable[..., None], dict[str, Any]]:
    """The kernel and its options, told the values in scalar memory, where all are zeros to it."""
    spec = kernel.options["grid_spec"]
    axes = len(spec.grid)
    lines = [_lines(value) for value in values]

    def told(refs: Sequence[Any]) -> list[Any]:
        return [ref if x is None else _Told(ref, x) for ref, x in zip(refs, lines, strict=True)]

    def body(*refs: Any) -> None:
        steps = [pl.program_id(axis) for axis in range(axes)]

        @pl.when(functools.reduce(jnp.logical_and, [step == 0 for step in steps]))
        def _() -> None:
            for ref, value, known in zip(refs, values, lines, strict=False):
                for index in zip(*value.nonzero(), strict=True) if known is None else ():
                    ref[tuple(map(int, index))] = jnp.asarray(value[index])

        kernel.body(*told(refs[: len(values)]), *refs[len(values) :])

    def with_told(block: Any) -> Any:
        if getattr(block, "index_map", None) is None:
            return block
        return replace(block, index_map=lambda *xs: block.index_map(*xs[:axes], *told(xs[axes:])))

    def is_block(x: Any) -> bool:
        return isinstance(x, pl.BlockSpec)

    ins, outs = jax.tree.map(with_told, (spec.in_specs, spec.out_specs), is_leaf=is_block)
    spec = pltpu.PrefetchScalarGridSpec(
        spec.num_scalar_prefetch, spec.grid, ins, outs, spec.scratch_shapes
    )
    return body, kernel.options | {"grid_spec": spec}


def _lines(value: np.ndarray) -> list[tuple[int, int, int]] | None:
    """Where a vector of integers goes on in another line, with its value there and its slope.

    None: it is no such vector, or would take more than `MOST_LINES`.
    """
    if value.ndim != 1 or value.dtype.kind != "i":
        return None
    lines: list[tuple[int, int, int]] = []
    at = 0
    while at < len(value):
        steps = np.diff(value[at:])
        other = np.flatnonzero(steps != steps[0]) if len(steps) else steps
        lines.append((at, int(value[at]), int(steps[0]) if len(steps) else 0))
        if len(lines) > MOST_LINES:
            return None
        at += int(other[0]) + 1 if len(other) else len(value)
    return lines


class _Told:
    """A vector in scalar memory, read one by one: what is there and the `lines` on top of it."""

    def __init__(self, ref: Any, lines: list[tuple[int, int, int]]) -> None:
        self._ref, self._lines = ref, lines

    def __getitem__(self, index: Any) -> jax.Array:
        (_, first, slope), *others = self._lines
        value = first + slope * index
        for start, first, slope in others:
            value = jnp.where(index >= start, first + slope * (index - start), value)
        return self._ref[index] + value


def _main() -> None:
    """Compiles what the command line says, within the limits."""
    import resource  # Windows has none, and no libtpu either

    seconds = int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    trial = json.loads(sys.argv[1])
    _compile(Trial(**trial | {"batch": Batch(**trial["batch"])}), sys.argv[2])


if __name__ == "__main__":
    _main()
