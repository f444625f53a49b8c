"""Named shapes from real models, with tolerances: one source for tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One layer's gated delta rule. `atol` bounds out, `state_atol` the state, both for unit-normal
    v against a float64 oracle; q and k are normalised, so both stay at the size of v.
    """

    name: str
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    max_beta: float = 1.0  # 2 where the model allows negative eigenvalues
    dtype: str = "float32"  # of q, k, v and the output
    atol: float = 2e-5  # float32 products over a chunk; the triangular inverse adds a few bits
    state_atol: float = 2e-5
    per_channel: bool = False  # one decay per key channel


# Rounding the output to bfloat16 (8 bits) costs up to 2^-9 of values below 2; the state stays
# float32, and the inputs are rounded before the oracle sees them.
_BF16_ATOL = 4e-3

# A kernel that multiplies bfloat16 operands rounds keys, writes and state once each: 2^-9, three
# times, of states below 4 (of outputs far less, since q is scaled by dk^-0.5).
MXU_STATE_ATOL = 2.5e-2

CASES = (
    Case("tiny", 2, 4, 8, 12),
    Case("tiny_ungrouped", 3, 3, 16, 8, max_beta=2.0),
    Case("tiny_per_channel", 2, 4, 16, 8, per_channel=True),
    Case("qwen35_9b", 16, 32, 128, 128, dtype="bfloat16", atol=_BF16_ATOL),
    Case("qwen3_next_80b", 16, 32, 128, 128),
    Case("kimi_linear_48b", 32, 32, 128, 128, dtype="bfloat16", atol=_BF16_ATOL, per_channel=True),
    Case("olmo_hybrid_7b", 30, 30, 96, 192, max_beta=2.0),
)
