"""What TPU kernels must know of the chip: its vector memory, and how many cores share the heads."""

from typing import NamedTuple

from pallas_kernels import platform as platform_
from pallas_kernels import tuning
from pallas_kernels.registry import Facts

MIB = 1 << 20
LANES, SUBLANES = 128, 8


class Chip(NamedTuple):
    """What block sizes depend on. A chip with two cores behind one device splits the heads."""

    vmem: int  # bytes per core
    cores: int

    @property
    def vmem_limit(self) -> int:
        """Bytes that a kernel may use; the rest of VMEM is XLA's."""
        return min(self.vmem * 7 // 8, 64 * MIB)


CHIPS = {
    "TPU v4": Chip(16 * MIB, 2),
    "TPU v5 lite": Chip(128 * MIB, 1),
    "TPU v5e": Chip(128 * MIB, 1),
    "TPU v5": Chip(64 * MIB, 2),
    "TPU v5p": Chip(64 * MIB, 2),
    "TPU v6 lite": Chip(128 * MIB, 1),
    "TPU v6e": Chip(128 * MIB, 1),
    "TPU7x": Chip(64 * MIB, 1),
}


def current() -> Chip:
    """The chip to build for; interpreted kernels are built for v6e."""
    return CHIPS.get(platform_.current().kind, CHIPS["TPU v6e"])


def refuses(facts: Facts) -> str | None:
    """Why no TPU kernel can be built for this device, or None."""
    if facts.device_kind not in CHIPS:
        return f"knows no {facts.device_kind!r}; known: {', '.join(CHIPS)}"
    return None


def refuses_dtypes(facts: Facts, *names: str) -> str | None:
    """Why the matrix unit cannot take these operands, or None."""
    dtypes = {facts.values[name].dtype for name in names}
    if len(dtypes) > 1 or dtypes & {"bfloat16", "float32"} != dtypes:
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        return f"{listed} must all be bfloat16 or all float32, not {', '.join(sorted(dtypes))}"
    return None


def decode_heads(op: str, k_heads: int, v_heads: int, state_bytes: int, chip: Chip) -> int | None:
    """Value heads per grid step of decode, whose pipeline holds four blocks of states.

    `state_bytes` is the state of one head. Larger blocks hide more of a transfer's latency; 2 MiB
    are enough. None: not even one head fits.
    """
    most = min(chip.vmem_limit // 8, 2 * MIB) // state_bytes
    shape = k_heads, v_heads, state_bytes
    return head_block(f"{op}.decode_heads", shape, most, chip)


def head_block(name: str, shape: tuple[int, ...], most: int, chip: Chip) -> int | None:
    """Value heads per grid step: what was tuned, else the largest block that fits.

    A block holds all value heads of some key heads, or a part of those of one; at most `most`, and
    so few that each core has one. None: not even one head fits.

    Args:
        name: what the size is of, for `tuning.pick`.
        shape: key heads, value heads, and what else the best size depends on.
        most: value heads.
        chip: with cores and vector memory.
    """
    k_heads, v_heads = shape[:2]
    group = v_heads // k_heads
    whole = [n * group for n in range(1, k_heads + 1) if k_heads % n == 0]
    parts = [n for n in range(1, group) if group % n == 0]
    fitting = [block for block in (*whole, *parts) if block <= most]
    split = [block for block in fitting if v_heads // block >= chip.cores]
    usable = split or fitting
    return tuning.pick(name, shape, usable, max(usable)) if usable else None
