"""Named shapes from real models, with tolerances: one source for tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One layer's Mamba-2 recurrence, for unit-normal x and dt, and B and C of length 1.

    `atol` bounds y, `state_atol` the state, against a float64 oracle.
    """

    name: str
    heads: int
    head_dim: int  # P
    groups: int
    state_size: int  # N
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    dtype: str = "float32"  # of x, B, C and y
    atol: float = 4e-5  # float32 sums over a few hundred tokens, each weighted by dt up to about 4
    state_atol: float = 4e-5


# Rounding y to bfloat16 (8 bits) costs up to 2^-9 of values below 16: x has about a normal's four
# deviations, D and dt as many.
_BF16_ATOL = 3.2e-2

CASES = (
    Case("tiny", 4, 8, 2, 12),
    Case("tiny_clamped", 3, 16, 1, 8, dt_limit=(0.3, 1.5)),
    Case("nemotron_3_nano", 64, 64, 8, 128, dtype="bfloat16", atol=_BF16_ATOL),
    Case("bamba_9b", 128, 64, 1, 128),
    Case("falcon_h1_7b", 24, 128, 1, 256, dtype="bfloat16", atol=_BF16_ATOL),
)

# A kernel that multiplies bfloat16 operands rounds x dt and B once each: 2^-9, twice, of products
# that add up to about 8.
MXU_STATE_ATOL = 3.2e-2
