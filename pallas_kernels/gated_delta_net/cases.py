"""Named shapes from real models, with tolerances: one source for tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One layer. `atol` bounds out, `state_atol` the recurrent state, both for unit-normal channels
    against a float64 oracle; the convolution's state must be equal bit for bit.
    """

    name: str
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    width: int = 4
    bias: bool = False
    allow_neg_eigval: bool = False
    dtype: str = "float32"  # of the channels, a, b, the convolution's weights and the output
    atol: float = 2e-5  # float32 sums, as in `gated_delta_rule`
    state_atol: float = 4e-5
    per_channel: bool = False  # one decay per key channel

    @property
    def channels(self) -> int:
        """C: of q, k and v."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


# Separate ops round q, k and v to bfloat16 between the convolution and the recurrence: 2^-9 of
# each, of states below 8; q, normalised and scaled by dk^-0.5, makes outputs of them that are a
# tenth as large, and are rounded too.
_BF16 = {"dtype": "bfloat16", "atol": 2e-2, "state_atol": 5e-2}

CASES = (
    Case("tiny", 2, 4, 8, 12, bias=True),
    Case("tiny_ungrouped", 3, 3, 16, 8, width=2, allow_neg_eigval=True),
    Case("tiny_per_channel", 2, 4, 16, 8, per_channel=True),
    Case("qwen35_9b", 16, 32, 128, 128, **_BF16),
    Case("qwen3_next_80b", 16, 32, 128, 128),
    Case("kimi_linear_48b", 32, 32, 128, 128, per_channel=True),
    Case("olmo_hybrid_7b", 30, 30, 96, 192, allow_neg_eigval=True),
)
