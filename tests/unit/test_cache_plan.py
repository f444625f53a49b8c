"""Cache sizes: what is clamped, in which order, and what is refused with which remedy."""

import itertools
import logging
import re
from dataclasses import replace

import pytest

from hybrid_jax.cache.plan import CachePlan, plan_caches
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.models import config_from_hf
from tests.helpers import tiny

PAGE = 8


def model_of(name: str, **changes: object) -> ModelConfig:
    return config_from_hf(tiny.TINY[name] | changes)


LINEAR_ONLY = {"layer_types": [tiny.LINEAR] * 5}
MODELS = {
    "full": model_of("qwen3"),
    "window": model_of("gemma3", layer_types=[tiny.SLIDING] * 6),
    "linear": model_of("lara_mini", **LINEAR_ONLY),
    "mixed": model_of("lara_mini"),
}


def reference_bytes(
    model: ModelConfig, seqs: int, length: int, pages: int, budget: int, guesses: int = 0
) -> int:
    """Bytes of all caches in float32 from the sizes in config.json, layer by layer.

    K and V: 2 heads of 16. States: 4 heads of 8 x 16, and 3 inputs of 96 channels. Window: 8.
    Guesses need places after a sequence and its window, and a state each.
    """
    page = PAGE * 2 * 2 * 16 * 4
    slot = 4 * 8 * 16 * 4 + 3 * (2 * 2 * 8 + 4 * 16) * 4
    whole = -(-(length + guesses) // PAGE)
    steps = 1 if guesses else 2  # a step runs ahead of the last
    in_flight = min(steps * -(-budget // PAGE), seqs * whole)
    window = min(-(-(8 + guesses) // PAGE) + 2, whole + 1)
    per_layer = {
        "full": pages * page,
        "window": (seqs * window + in_flight + 1) * page,
        "linear": (seqs * (guesses + 1) + 1) * slot,
    }
    return sum(per_layer[layer.kind] for layer in model.layers)


def config_of(**options: object) -> EngineConfig:
    """Without a prefix cache, and so without checkpoint rows, unless they are asked for."""
    values = {"page_size": PAGE, "max_num_batched_tokens": 32, "prefix_cache": False, **options}
    return EngineConfig(**values)  # type: ignore[arg-type]


def plan_of(model: ModelConfig, **options: object) -> CachePlan:
    return plan_caches(model, config_of(**options), "float32")


@pytest.mark.parametrize("guesses", [0, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_bytes_are_those_of_a_sum_over_layers(kind: str, guesses: int) -> None:
    model = MODELS[kind]
    for seqs, length in itertools.product((1, 3, 17), (2, 8, 9, 100)):
        limits = {"max_num_seqs": seqs, "max_model_len": length, "cache_bytes": 2**30}
        plan = plan_of(model, num_speculative_tokens=guesses, **limits)
        pages = seqs * -(-(length + guesses) // PAGE) + 1
        budget = max(32, seqs * (guesses + 1))
        # Exact up to the alignment of each array, of which a layer has at most two.
        expected = reference_bytes(model, seqs, length, pages, budget, guesses)
        assert 0 <= plan.total_bytes - expected < 64 * 2 * len(model.layers)


@pytest.mark.parametrize("kind", MODELS)
def test_pages_then_sequences_then_length_are_clamped(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Against a search over all values, for budgets from ample to nothing."""
    model, most_seqs, most_len = MODELS[kind], 16, 1024
    slack = 64 * 2 * len(model.layers)
    ample = plan_of(model, cache_bytes=2**40)
    assert (ample.config.max_num_seqs, ample.config.max_model_len) == (most_seqs, most_len)
    refused = 0
    for budget in [ample.total_bytes * n // 100 for n in (100, 99, 60, 30, 10, 5, 3, 2, 1)]:

        def fits(seqs: int, length: int, budget: int = budget) -> bool:
            least = -(-length // PAGE) + 1
            return reference_bytes(model, seqs, length, least, 32) + slack <= budget

        caplog.clear()
        seqs = next((n for n in range(most_seqs, 0, -1) if fits(n, most_len)), 1)
        length = next((n for n in range(most_len, 1, -1) if fits(seqs, n)), 0)
        if not length:
            with pytest.raises(ValueError, match="not even one fits"):
                plan_of(model, cache_bytes=budget - slack)
            refused += 1
            continue
        with caplog.at_level(logging.WARNING):
            plan = plan_of(model, cache_bytes=budget)
        assert plan.total_bytes <= budget
        # `slack` may cost the reference one sequence or page.
        assert plan.config.max_num_seqs - seqs in (0, 1)
        assert 0 <= plan.config.max_model_len - length <= 2 * PAGE
        assert plan.config.row_buckets[-1] == plan.config.max_num_seqs
        clamped = plan.sizes != ample.sizes
        assert len(caplog.records) == clamped
        if plan.config.max_num_seqs < most_seqs:
            number = plan.config.max_num_seqs
            assert f"max_num_seqs from 16 to {number}" in caplog.text
            assert "are free for caches" in caplog.text
    assert refused < 9


def test_what_the_user_gave_is_refused_with_the_largest_value_that_fits() -> None:
    model = MODELS["mixed"]
    budget = plan_of(model, max_num_seqs=9, max_model_len=2, cache_bytes=2**30).total_bytes + 5000
    cases = [
        {"max_num_seqs": 500},
        {"max_model_len": 1000, "max_num_seqs": 2},
        {"max_model_len": 1000},
        {"max_num_seqs": 3, "num_pages": 900},
    ]
    for given in cases:
        with pytest.raises(ValueError, match="would fit") as refusal:
            plan_of(model, cache_bytes=budget, **given)
        offers = re.findall(r"(max_num_seqs|max_model_len|num_pages) ([\d,]+)(?= or| would)",
                            str(refusal.value))  # fmt: skip
        assert offers, refusal.value
        for name, value in offers:
            number = int(value.replace(",", ""))
            assert number < given[name]
            assert (
                plan_of(model, cache_bytes=budget, **given | {name: number}).total_bytes <= budget
            )
            with pytest.raises(ValueError, match="would fit"):
                plan_of(model, cache_bytes=budget, **given | {name: number + 1})


def test_checkpoint_rows_are_slots_and_yield_before_sequences() -> None:
    model = MODELS["mixed"]
    few, many = (
        plan_of(model, num_checkpoints=n, prefix_cache=True, cache_bytes=2**30) for n in (1, 33)
    )
    grown = [b - a for a, b in zip(few.sizes.counts, many.sizes.counts, strict=True)]
    assert sorted(grown) == [0, 0, 32]
    least = plan_of(model, num_checkpoints=1, prefix_cache=True, num_pages=130, cache_bytes=2**30)
    slot = 2 * (4 * 8 * 16 * 4 + 3 * (2 * 2 * 8 + 4 * 16) * 4)
    plan = plan_of(model, prefix_cache=True, cache_bytes=least.total_bytes + 5 * slot)
    assert plan.config.max_num_seqs == 16 and plan.config.max_model_len == 1024
    assert 1 <= plan.config.num_checkpoints <= 7 < 32


def test_state_dtype_halves_recurrent_states_only() -> None:
    model = MODELS["linear"]
    wide, narrow = (
        plan_of(model, state_dtype=dtype, cache_bytes=2**30) for dtype in ("float32", "bfloat16")
    )
    slots, recurrent = wide.sizes.counts[0], 4 * 8 * 16
    assert wide.total_bytes - narrow.total_bytes == 5 * slots * recurrent * 2


@pytest.mark.parametrize("name", ["kv_dtype", "state_dtype"])
def test_dtypes_that_no_kernel_reads_are_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"{name} 'float8_e4m3fn' is not supported; choose .*float32"
    ):
        EngineConfig(**{name: "float8_e4m3fn"})  # type: ignore[arg-type]


def test_a_resolved_config_plans_the_same_again() -> None:
    model = MODELS["mixed"]
    plan = plan_of(model, cache_bytes=2**20)
    again = plan_caches(model, replace(plan.config), "float32")
    assert again == plan
