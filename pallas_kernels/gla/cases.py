"""Named shapes from real models, with tolerances: one source for tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One layer's gated linear attention, for unit-normal v, and keys and queries of length 1.

    `atol` bounds out, `state_atol` the state, against a float64 oracle.
    """

    name: str
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    per_channel: bool = False  # one decay per key channel
    dtype: str = "float32"  # of q, k, v and the output
    atol: float = 2e-5  # float32 sums over a few hundred tokens
    state_atol: float = 2e-5


# Rounding the output to bfloat16 (8 bits) costs up to 2^-9 of values below 4.
_BF16_ATOL = 8e-3

CASES = (
    Case("tiny", 2, 4, 8, 12),
    Case("tiny_per_channel", 3, 3, 16, 8, per_channel=True),
    Case("minimax_text_01", 64, 64, 128, 128, dtype="bfloat16", atol=_BF16_ATOL),  # lightning
    Case("gla_1b", 4, 4, 256, 512, per_channel=True, dtype="bfloat16", atol=_BF16_ATOL),
)

# A kernel that multiplies bfloat16 operands rounds decayed keys, values and the state once each:
# 2^-9 of products below 1, which add up over some hundred tokens with random signs.
MXU_STATE_ATOL = 1e-2
