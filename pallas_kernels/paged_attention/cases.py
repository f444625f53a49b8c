"""Named shapes from real models, with tolerances: one source for tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One layer's attention. `atol` bounds |out - float64 oracle| for unit-normal q, k and v.

    Outputs are averages of v, so they are at most a few units, and an absolute bound is fair.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: str = "float32"  # of q, k and v
    pages_dtype: str | None = None  # of the pages' values, which then have scales; None: `dtype`
    atol: float = 2e-5  # float32 sums over a few hundred tokens, exp of scores up to about 10


# Rounding the output to bfloat16 (8 bits) costs up to 2^-9 of values below 4.
_BF16_ATOL = 8e-3
# With scales the output is rounded twice, and so are queries, which moves scores by up to 2^-9.
_SCALED_ATOL = 2.5 * _BF16_ATOL

CASES = (
    Case("tiny", 4, 2, 8, page_size=4),
    Case("tiny_window", 4, 2, 8, page_size=4, window=9),
    Case("tiny_everything", 6, 2, 8, page_size=4, window=6, softcap=5.0, sinks=True),
    Case("tiny_page_1", 2, 1, 8, page_size=1, window=3),
    Case("gemma3_270m_local", 4, 1, 256, window=512, dtype="bfloat16", atol=_BF16_ATOL),
    Case("gemma3_27b_global", 32, 16, 128, dtype="bfloat16", atol=_BF16_ATOL),
    Case("gemma2_9b", 16, 8, 256, softcap=50.0),
    Case("qwen35_9b", 16, 4, 256, dtype="bfloat16", atol=_BF16_ATOL),
    Case("qwen3_next_80b", 16, 2, 256),
    Case("olmo_hybrid_7b", 30, 30, 128),
    Case("gpt_oss_20b_local", 64, 8, 64, window=128, sinks=True, dtype="bfloat16", atol=_BF16_ATOL),
    Case(
        "everything_int8",
        6,
        2,
        8,
        page_size=4,
        window=6,
        softcap=5.0,
        sinks=True,
        pages_dtype="int8",
    ),
    Case("qwen35_9b_int8", 16, 4, 256, dtype="bfloat16", pages_dtype="int8", atol=_SCALED_ATOL),
    Case(
        "llama3_8b_float8",
        32,
        8,
        128,
        dtype="bfloat16",
        pages_dtype="float8_e4m3fn",
        atol=_SCALED_ATOL,
    ),
)
