"""Named shapes from real models, with tolerances: one source for tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One layer's scan, for unit-normal x and dt, and B and C of length 1.

    `atol` bounds y, `state_atol` the state, against a float64 oracle.
    """

    name: str
    channels: int
    state_size: int
    dtype: str = "float32"  # of x, B, C and y
    atol: float = 4e-5  # float32 sums over a few hundred tokens, each weighted by dt up to about 4
    state_atol: float = 4e-5


CASES = (
    Case("tiny", 12, 4),
    # Rounding y to bfloat16 (8 bits) costs up to 2^-9 of values below 16.
    Case("falcon_mamba_7b", 8192, 16, dtype="bfloat16", atol=3.2e-2),
)
