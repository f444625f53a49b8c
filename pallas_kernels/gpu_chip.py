"""What Triton kernels must know of the GPU: that its compiler takes them, and how much fills it."""

from pallas_kernels.registry import Facts

FAMILIES = ("A100", "H100", "H200", "B200")  # words of the device kind; GH200 and GB200 have one
PROGRAMS = 512  # that fill the 108 to 148 multiprocessors of these several times


def refuses(facts: Facts) -> str | None:
    """Why no Triton kernel is built for this device, or None."""
    if facts.platform != "gpu":
        return f"is for GPUs, not for {facts.platform}"
    if not any(family in facts.device_kind for family in FAMILIES):
        return f"was compiled for {', '.join(FAMILIES)} only, not for {facts.device_kind!r}"
    if not facts.values["decode_only"]:
        return "has no prefill yet, and the batch may have prefill rows"
    return None


def power_of_two(n: int) -> int:
    """The lowest that is not below n: Triton's tiles have no other sizes."""
    return 1 << (n - 1).bit_length()
