"""Named shapes from real models, with tolerances: one source for tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One layer's recurrence, for unit-normal v, and r, k and a of length 1.

    `atol` bounds out, `state_atol` the state, against a float64 oracle.
    """

    name: str
    heads: int
    k_dim: int
    v_dim: int
    dtype: str = "float32"  # of all operands but w, and of the output
    atol: float = 2e-5  # float32 sums over a few hundred tokens
    state_atol: float = 2e-5


CASES = (
    Case("tiny", 3, 8, 12),
    # Rounding the output to bfloat16 (8 bits) costs up to 2^-9 of values below 4.
    Case("rwkv7_2b9", 40, 64, 64, dtype="bfloat16", atol=8e-3),
)
