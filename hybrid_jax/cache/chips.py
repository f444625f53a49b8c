"""What arrays weigh on a chip: its memory, and how its compiler pads them."""

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

GIB, MIB = 2**30, 2**20
LANES, SUBLANES = 128, 8
ALIGNMENT = {"cpu": 64, "gpu": 256}  # bytes, of XLA's buffers
UNPADDED = ""  # no platform: the bytes of the elements alone


@dataclass(frozen=True)
class Chip:
    """One JAX device. `memory_bytes` is its nominal memory: runtimes keep some of it."""

    name: str
    platform: Literal["cpu", "gpu", "tpu"]
    memory_bytes: int
    kind: str  # as the runtime names it
    topology: str = ""  # the smallest one that libtpu compiles for
    has_float8: bool = False  # kernels read pages of it


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", 32 * GIB, "TPU v4", "v4:2x2x1", has_float8=True),
        Chip("v5e", "tpu", 16 * GIB, "TPU v5 lite", "v5e:2x2", has_float8=True),
        Chip("v5p", "tpu", 95 * GIB, "TPU v5", "v5p:2x2x1", has_float8=True),
        Chip("v6e", "tpu", 32 * GIB, "TPU v6 lite", "v6e:2x2", has_float8=True),
        # Two devices on a chip of 192 GiB.
        Chip("tpu7x", "tpu", 96 * GIB, "TPU7x", "tpu7x:2x2x1", has_float8=True),
        Chip("a100", "gpu", 81_920 * MIB, "NVIDIA A100-SXM4-80GB"),
        Chip("h100", "gpu", 81_559 * MIB, "NVIDIA H100 80GB HBM3", has_float8=True),
        Chip("h200", "gpu", 143_771 * MIB, "NVIDIA H200", has_float8=True),
        Chip("b200", "gpu", 183_359 * MIB, "NVIDIA B200", has_float8=True),
    )
}


def find_chip(name: str) -> Chip:
    """A chip of `CHIPS`, or for "cpu" this machine's memory, or for "" the device at hand.

    Raises:
        ValueError: an unknown name; the message lists those that are known.
    """
    if not name:
        return this_chip()
    if name == "cpu":
        return Chip("cpu", "cpu", host_memory().total, "cpu", has_float8=True)  # emulated
    if name not in CHIPS:
        raise ValueError(f"chip {name!r} is not known; choose cpu, {', '.join(CHIPS)}")
    return CHIPS[name]


def this_chip() -> Chip:
    """The device that JAX uses by default."""
    platform, device = jax.default_backend(), jax.local_devices()[0]
    if platform not in ("gpu", "tpu"):
        return find_chip("cpu")
    known = [chip for chip in CHIPS.values() if chip.kind == device.device_kind]
    stats = device.memory_stats() or {}
    memory = stats.get("bytes_limit") or (known[0].memory_bytes if known else 0)
    if known:
        return replace(known[0], memory_bytes=memory)
    return Chip(device.device_kind, platform, memory, device.device_kind)  # type: ignore[arg-type]


def check_float8(chip: Chip) -> None:
    """Raises ValueError if no kernel for a chip reads float8."""
    if not chip.has_float8:
        raise ValueError(
            f"kv_dtype fp8 needs a chip with float8, which {chip.name} is not; use bfloat16 or "
            f"one of {', '.join(other.name for other in CHIPS.values() if other.has_float8)}"
        )


@dataclass(frozen=True)
class HostMemory:
    """Bytes of this machine's memory."""

    total: int
    available: int  # free, or held by caches that the kernel gives up


def host_memory() -> HostMemory:
    """What the host has now. Limits of containers are not seen."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    return HostMemory(total, free)


def available_bytes(utilization: float, *, loaded: int = 0) -> int:
    """Bytes of the default device that this process may fill: a share, less what is taken.

    Args:
        utilization: the share of the device's memory, or of what the host has available.
        loaded: bytes already on the device that are to count as available.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        taken = stats.get("bytes_in_use", 0) - loaded
        return max(int(stats["bytes_limit"] * utilization) - taken, 0)
    return int((host_memory().available + loaded) * utilization)


def format_bytes(count: float) -> str:
    """A number of bytes for people: `512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def device_bytes(shape: Sequence[int], dtype: DTypeLike, platform: str) -> int:
    """Bytes that an array of `shape` takes on a device of `platform`, padding included.

    TPUs hold the two innermost dimensions in tiles: up to 8 rows (4 and 2 for fewer rows, but not
    fewer than share a 32-bit word) of 128 lanes. Which two dimensions these are is the compiler's
    choice: those that pad least.
    """
    itemsize = jnp.dtype(dtype).itemsize
    if not shape or platform != "tpu":
        return _round_up(math.prod(shape) * itemsize, ALIGNMENT.get(platform, 1))
    if len(shape) == 1:
        lanes = LANES if shape[0] < SUBLANES * LANES else SUBLANES * LANES
        return _round_up(shape[0], lanes) * itemsize
    return itemsize * min(
        _tiled_size(shape, row, lane, itemsize)
        for row, lane in itertools.permutations(range(len(shape)), 2)
    )


def _tiled_size(shape: Sequence[int], row: int, lane: int, itemsize: int) -> int:
    """Elements of an array whose dimensions `row` and `lane` are tiled."""
    least = max(4 // itemsize, 1)
    rows = min(SUBLANES, max(least, 1 << (shape[row] - 1).bit_length()))
    outer = math.prod(n for i, n in enumerate(shape) if i not in (row, lane))
    return outer * _round_up(shape[row], rows) * _round_up(shape[lane], LANES)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
