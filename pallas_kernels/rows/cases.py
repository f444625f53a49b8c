"""Named pools of real models: one source for tests, benchmarks and tuning. Results are exact."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A pool and the type of its values."""

    name: str
    shape: tuple[int, ...]  # rows first
    dtype: str = "float32"


CASES = (
    Case("tiny", (9, 4, 8, 128)),
    Case("tiny_bf16", (9, 4, 8, 128), "bfloat16"),
    Case("tiny_bits", (9, 3, 10), "uint16"),  # how CPU holds bfloat16
    Case("qwen35_9b_slots", (65, 32, 128, 128)),
    Case("qwen35_9b_pages", (1024, 16, 8, 256), "bfloat16"),
    Case("nemotron_3_nano_slots", (65, 128, 4096)),
)
