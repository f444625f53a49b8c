"""The memory plan of models that are not loaded, against sums by hand; other formulas too."""

from io import StringIO
from typing import Any

import jax
import pytest
from rich.console import Console
from rich.table import Table

from hybrid_jax.cache.chips import device_bytes, find_chip
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.memory.plan import MemoryPlan, plan_memory
from hybrid_jax.memory.tables import concurrency_table, plan_line
from hybrid_jax.models import config_from_hf
from hybrid_jax.runtime.step import abstract_full, init_carry
from pallas_kernels import platform
from tests.helpers import tiny

GIB = 2**30
# The sizes of Qwen3.5-9B, from its config.json: 24 gated-delta and 8 full-attention layers.
QWEN35 = tiny.TINY["qwen3_5"] | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "layer_types": [tiny.LINEAR, tiny.LINEAR, tiny.LINEAR, tiny.FULL] * 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
}


def plan_of(config: dict[str, Any] | ModelConfig, chip: str = "v5p", **options: Any) -> MemoryPlan:
    model = config if isinstance(config, ModelConfig) else config_from_hf(config)
    return plan_memory(
        model,
        EngineConfig(prefix_cache=False, **options),
        "bfloat16",
        chip=find_chip(chip),
        temporaries_from="estimate",
    )


def text_of(table: Table) -> str:
    out = StringIO()
    Console(file=out, width=200).print(table)
    return out.getvalue()


def test_a_count_that_stops_at_the_limit_claims_no_gain() -> None:
    """Tiny sequences on a large chip: more of them than an engine could have."""
    rows = {
        cells[0]: cells
        for line in text_of(concurrency_table(plan_of(tiny.TINY["qwen3_5"], "h200"))).splitlines()
        if len(cells := [cell.strip() for cell in line.strip("│").split("│")]) == 5
    }
    assert rows["256"][1].startswith(">= 65,535 (") and rows["256"][4] == "- / -"
    # Others' columns stop there as well, where they get so far.
    counts = [int(cell.split()[-3].replace(",", "")) for cell in rows["256"][1:4]]
    assert counts[1] == 65_535 and max(counts) == 65_535
    assert [cell.startswith(">= ") for cell in rows["256"][1:4]] == [c == 65_535 for c in counts]
    large = text_of(concurrency_table(plan_of(QWEN35, "h200")))
    assert ">=" not in large and "x / " in large


def test_guesses_bound_how_many_fit() -> None:
    """A step of all of them has 65 tokens each, and no step may have more than 2^20."""
    plan = plan_of(tiny.TINY["qwen3_5"], "h200", num_speculative_tokens=64)
    counts = [line.layer_by_layer for line in plan.concurrency()]
    assert max(counts) == 2**20 // 65


def test_the_plan_for_a_log_is_one_plain_line() -> None:
    plan = plan_of(QWEN35, max_num_seqs=64, max_model_len=4096)
    line = plan_line(plan)
    assert line.isascii() and "\n" not in line
    assert all(part.name in line for part in plan.lines())
    assert "max_num_seqs 64, max_model_len 4096" in line


def test_qwen35_by_hand() -> None:
    plan = plan_of(QWEN35, max_num_seqs=64, max_model_len=4096)
    lines = {line.name: line for line in plan.lines()}
    linear, full = lines["linear 32 x 128 x 128"], lines["full 4 x 256"]
    assert (linear.layers, linear.count) == (24, 65)
    # 2 MiB of state per slot and layer, and 3 times 8,192 channels, which are whole tiles.
    assert linear.nbytes == 24 * 65 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert linear.padding == 0
    assert (full.layers, full.count) == (8, 64 * 256 + 1)
    assert full.nbytes == 8 * full.count * 16 * 2 * 4 * 256 * 2
    assert full.padding == 0
    assert full.tails == full.nbytes * 32 // full.count  # half a page for each of 64 sequences
    # Embedding and head, then per layer three matrices of the MLP and the mixer's.
    attention = 4096 * 256 * (2 * 16 + 2 * 4 + 16)
    delta = 4096 * (8192 + 4096 + 2 * 32 + 4096)
    matrices = 2 * 248320 * 4096 + 32 * 3 * 4096 * 12288 + 8 * attention + 24 * delta
    assert plan.parameters == pytest.approx(2 * matrices, rel=1e-3)
    assert plan.available == int(0.9 * 95 * GIB)
    assert plan.total == sum(line.nbytes for line in plan.lines()) <= plan.available


def test_default_flags_fit_a_chip_that_holds_the_weights() -> None:
    """About 17 GiB of weights: too much for 16 GiB, and just enough for a share of 32."""
    with pytest.raises(ValueError, match=r"parameters \(1\d\.\d GiB\).*tensor_parallel_size 1"):
        plan_of(QWEN35, "v5e")
    tight = plan_of(QWEN35, "v6e", memory_utilization=0.555)
    assert tight.total <= tight.available
    assert 1 <= tight.config.max_num_seqs < 16 and tight.config.max_model_len == 8192
    ample = plan_of(QWEN35, "h200")
    assert (ample.config.max_num_seqs, ample.config.max_model_len) == (16, 8192)


def test_each_device_has_its_share() -> None:
    """What divides is cut; four KV heads over eight devices are not."""
    one, four, eight = (
        plan_of(QWEN35, tensor_parallel_size=n, max_num_seqs=64, max_model_len=4096)
        for n in (1, 4, 8)
    )
    names = [line.name for line in one.lines()]
    full = names.index("full 4 x 256")
    pages = [plan.lines()[full].nbytes for plan in (one, four, eight)]
    assert pages[0] == 4 * pages[1] == pages[2]
    assert one.parameters / 4 < four.parameters < one.parameters / 3
    assert eight.parameters < four.parameters


def test_the_formulas_of_others_by_hand() -> None:
    """At 4,096 tokens on a GPU, where nothing is padded."""
    plan = plan_of(QWEN35, "h200", max_model_len=4096)
    line = next(c for c in plan.concurrency() if c.context == 4096)
    state = 32 * 128 * 128 * 4 + 3 * 8192 * 2
    page = 16 * 2 * 4 * 256 * 2
    blow_up = -(-state // page)
    assert 16 * blow_up == 528
    pages = -(-4096 // 528)
    assert line.bytes_largest == 32 * pages * blow_up * page
    # Four sets of 8 layers: three linear ones with a page each, one of attention.
    assert line.bytes_unified == 8 * (3 + pages) * blow_up * page
    by_layer = 8 * 256 * page + 24 * state
    assert line.bytes_by_layer == pytest.approx(by_layer, rel=0.01)
    assert line.largest_layer == plan.cache_budget // line.bytes_largest
    assert line.layer_by_layer > line.unified_pages > line.largest_layer > 0


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "lara_mini"])
def test_concurrency_is_what_a_plan_with_so_many_sequences_holds(name: str) -> None:
    """One more sequence of full length would not fit."""
    model = config_from_hf(tiny.TINY[name])
    plan = plan_of(model, "cpu", cache_bytes=2**20, max_model_len=64, max_num_seqs=2)
    for line in plan.concurrency():
        if line.layer_by_layer < 2:
            continue
        for extra in (0, 1):
            count = line.layer_by_layer + extra
            options = {"max_num_seqs": count, "max_model_len": line.context}
            wanted = plan_of(model, "cpu", cache_bytes=2**30, **options)
            assert (wanted.caches.total_bytes <= 2**20) == (extra == 0), line


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "per_token"),
    [
        (2, 64, 2 * 2 * 64 * 2),  # K and V of a head share the 128 lanes of a row: nothing is lost
        (2, 80, 2 * 2 * 128 * 2),
        (3, 128, 8 * 128 * 2),  # 6 rows take 8
    ],
)
def test_pages_of_a_tpu_are_planned_as_they_are_made(
    kv_heads: int, head_dim: int, per_token: int
) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    plan = plan_of(tiny.TINY["qwen3"] | heads, "v6e", max_num_seqs=2, max_model_len=64)
    chip, caches = plan.chip, plan.caches
    line = next(line for line in plan.lines() if line.unit == "page")
    tokens = line.layers * line.count * plan.config.page_size
    assert line.nbytes == tokens * per_token
    assert line.nbytes - line.padding == tokens * 2 * 2 * kv_heads * head_dim
    with platform.target(chip.platform, chip.kind):
        carry = init_carry(caches.groups, caches.sizes, plan.config, full=abstract_full)
    live = [device_bytes(x.shape, x.dtype, "tpu") for x in jax.tree.leaves(carry.caches)]
    assert sum(live) == line.nbytes
