"""Named shapes from real models, with tolerances: one source for tests, benchmarks and tuning."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Case:
    """One layer's convolution. `atol` bounds |y - float64 oracle| for unit-normal x and weight.

    The new state must be equal bit for bit: it is a copy of inputs.
    """

    name: str
    channels: int
    width: int
    bias: bool = False
    activation: Literal["silu"] | None = "silu"
    dtype: str = "float32"  # of x, the state's values and y
    atol: float = 5e-6  # a float32 sum of W products of size up to about 10


CASES = (
    Case("tiny", 6, 4, bias=True),
    Case("tiny_width_2", 5, 2, activation=None),
    # Rounding y to bfloat16 (8 bits) costs up to 2^-9 of values below 16.
    Case("qwen35_9b", 8192, 4, dtype="bfloat16", atol=3.2e-2),
    Case("qwen3_next_80b", 8192, 4),
    Case("olmo_hybrid_7b", 11520, 4),
    Case("lfm2_1b", 2048, 3, activation=None),
)
