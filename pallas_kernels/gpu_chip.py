"""What Triton kernels must know of the GPU: that its compiler takes them, and how much fills it."""

from pallas_kernels import tuning
from pallas_kernels.registry import Facts

FAMILIES = ("A100", "H100", "H200", "B200")  # words of the device kind; GH200 and GB200 have one
STATE_TILE = 4096  # float32 values of a state that a program of 128 threads holds
MIN_COLUMNS, MAX_COLUMNS = 8, 64  # neighbours in memory: 32 bytes are one transfer
PROCESSORS = 108  # multiprocessors, at least; at most 148
PROGRAMS = 512  # that fill them several times


def refuses(facts: Facts) -> str | None:
    """Why no Triton kernel is built for this device, or None."""
    if not any(family in facts.device_kind for family in FAMILIES):
        return f"was compiled for {', '.join(FAMILIES)} only, not for {facts.device_kind!r}"
    return None


def power_of_two(n: int) -> int:
    """The lowest that is not below n: Triton's tiles have no other sizes."""
    return 1 << (n - 1).bit_length()


def refuses_state(channels: int) -> str | None:
    """Why a program cannot hold a few columns of a state with so many rows, or None."""
    most = STATE_TILE // MIN_COLUMNS
    return f"columns of {channels} values are above {most}" if channels > most else None


def state_columns(op: str, channels: int, columns: int) -> int:
    """Columns of a state [channels, columns] that a program holds: a power of two."""
    most = STATE_TILE // power_of_two(channels)
    default = min(most, max(power_of_two(columns), MIN_COLUMNS), MAX_COLUMNS)
    return tuning.pick(f"{op}.columns", (channels, columns), powers(MIN_COLUMNS, most), default)


def powers(least: int, most: int) -> tuple[int, ...]:
    """The powers of two from `least`, which is one, to `most`."""
    return tuple(1 << n for n in range(least.bit_length() - 1, most.bit_length()))
