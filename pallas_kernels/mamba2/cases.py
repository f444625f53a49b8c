"""Named shapes from real models, with tolerances: one source for tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One layer. `atol` bounds y, `state_atol` the recurrent state, both against a float64 oracle
    and for convolved x of variance 1 and B and C of length 1; the convolution's state must be equal
    bit for bit.
    """

    name: str
    heads: int
    head_dim: int  # P
    groups: int
    state_size: int  # N
    width: int = 4
    bias: bool = True
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    dtype: str = "float32"  # of the channels, dt, the convolution's weights and the output
    atol: float = 4e-5  # float32 sums, as in `ssd`
    state_atol: float = 4e-5

    @property
    def channels(self) -> int:
        """C: of x, B and C."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_size


# Rounding y, as in `ssd`: 2^-9 of values below 16.
BF16_ATOL = 3.2e-2
# Separate ops round x, B and C as well: 2^-9 each, of y below 16, and of x and B in states whose
# terms add up to about 8.
_BF16 = {"dtype": "bfloat16", "atol": 2 * BF16_ATOL, "state_atol": 3.2e-2}

CASES = (
    Case("tiny", 4, 8, 2, 12),
    Case("tiny_clamped", 3, 16, 1, 8, width=2, bias=False, dt_limit=(0.3, 1.5)),
    Case("nemotron_3_nano", 64, 64, 8, 128, **_BF16),
    Case("bamba_9b", 128, 64, 1, 128),
    Case("falcon_h1_7b", 24, 128, 1, 256, **_BF16),
)
