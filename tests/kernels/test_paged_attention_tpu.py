"""The TPU kernels of paged_attention, interpreted on CPU, on the cases of the reference.

`interpret=True` goes broad. It does not see a missing wait or a copy into a buffer in use; the
interpreter of TPU semantics does, with race detection and both ways of timing copies, but it needs
milliseconds per page: a few pages only.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import registry, tuning
from pallas_kernels.paged_attention import (
    mosaic_tpu,
    paged_attention,
    tpu_decode,
    tpu_layout,
    tpu_prefill_layout,
)
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.scales import run_scaled
from tests.helpers.ragged import Rows
from tests.kernels.test_paged_attention import Setup

FLOAT8 = "float8_e4m3fn"
RACE = "RACE DETECTED"  # what the interpreter prints; it does not raise
# Weights go to the matrix unit as bfloat16, too: each is off by up to 2^-9 of itself, and so is the
# average of values below 2, beside the rounding of the output that `Case.atol` allows for.
WEIGHTS_ATOL = 2 * 2**-9

CASE = {case.name: case for case in CASES}
BATCHES = {
    "decode": Rows(decode=(0, 300, 1, 7, 130, 8, 9), pad_rows=2),
    "one_decode": Rows(decode=(17,)),
    "two_steps": Rows(decode=(3, 40, 5, 0, 1, 2, 33, 9, 60, 11), pad_rows=7),
    "padding": Rows(pad_rows=4),
}
# Rows that are shorter and longer than a tile, end within pages, and have earlier tokens. After
# rows of many blocks come short ones, one of them with a part that ends in another piece of pages.
MIXED = Rows(decode=(130, 3, 15), prefill=((140, 65), (63, 1), (0, 33)), pad_rows=2, pad_tokens=5)
# What the models in cases.py leave out: other head sizes, groups and numbers of KV heads.
MORE = (
    Case("dim_80", 2, 2, 80, window=20),
    Case("dim_96_bf16", 16, 1, 96, dtype="bfloat16", atol=8e-3),
    Case("dim_512", 4, 4, 512),
    Case("dim_512_bf16", 4, 2, 512, softcap=30.0, dtype="bfloat16", atol=8e-3),
    Case("12_kv_heads_bf16", 12, 12, 128, dtype="bfloat16", atol=8e-3),
    Case(
        "group_16_page_64_bf16", 32, 2, 64, 64, window=70, sinks=True, dtype="bfloat16", atol=8e-3
    ),
    Case("page_256_bf16", 8, 4, 128, 256, dtype="bfloat16", atol=8e-3),
    Case("dim_64_of_8_heads_bf16", 32, 8, 64, softcap=20.0, dtype="bfloat16", atol=8e-3),
    Case("dim_64_of_one_head_bf16", 4, 1, 64, dtype="bfloat16", atol=8e-3),
    Case("dim_64_of_5_heads", 10, 5, 64, sinks=True),
    Case("dim_80_of_3_heads_bf16", 6, 3, 80, window=30, sinks=True, dtype="bfloat16", atol=8e-3),
    Case("dim_192_of_7_heads_bf16", 7, 7, 192, dtype="bfloat16", atol=8e-3),
)
# What the prefill kernel takes apart in its own ways: query heads per KV head.
GROUPS = (
    Case("group_4_bf16", 32, 8, 128, dtype="bfloat16", atol=8e-3),
    Case("group_2_window_bf16", 16, 8, 128, 32, window=40, sinks=True, dtype="bfloat16", atol=8e-3),
    Case("group_1_page_64", 8, 8, 128, 64, softcap=10.0),
    Case("group_16_of_one_head", 16, 1, 128, 128, window=20, sinks=True),
    Case("group_3_window", 12, 4, 128, window=9, sinks=True),
)
# Rows of one vector of lanes, of two, and those that K and V share.
BYTES = (
    Case("dim_256", 4, 2, 256, window=40, sinks=True, dtype="bfloat16", atol=2e-2),
    Case("group_4", 16, 4, 128, dtype="bfloat16", atol=2e-2),
    Case("dim_64", 16, 8, 64, softcap=20.0, dtype="bfloat16", atol=2e-2),
)
SPOILED = (
    (CASE["tiny"], BATCHES["decode"], np.inf),
    (CASE["tiny_everything"], MIXED, np.inf),
    (replace(BYTES[0], pages_dtype=FLOAT8), MIXED, np.nan),
    *(
        pytest.param(case, MIXED, np.nan, marks=pytest.mark.slow)
        for case in (CASE["tiny"], CASE["gemma2_9b"], CASE["gemma3_27b_global"], *GROUPS)
    ),
)
PAGES_OF_48 = registry.ArrayFacts((9, 48, 16, 256), "float32")
PREFILLS = {
    "mixed": MIXED,
    "prompts": Rows(prefill=((0, 1), (0, 130), (31, 129)), pad_rows=1),
    "long_context": Rows(decode=(20,), prefill=((300, 40),), pad_tokens=70),
    "padding_mixed": Rows(pad_rows=4, pad_tokens=9),
}
SLOW_RACE = Case("one_head", 2, 1, 256, page_size=8, dtype="bfloat16", atol=8e-3)
FLOAT8_RACE = Case("two_heads", 4, 2, 128, 8, dtype="bfloat16", pages_dtype=FLOAT8, atol=2e-2)
RACES = (
    CASE["tiny_everything"],
    FLOAT8_RACE,
    *(pytest.param(case, marks=pytest.mark.slow) for case in (CASE["tiny"], SLOW_RACE)),
)
PREFILL_RACES = (
    Case("window", 4, 2, 8, page_size=32, window=270),
    replace(FLOAT8_RACE, page_size=32),
    pytest.param(replace(SLOW_RACE, page_size=32), marks=pytest.mark.slow),
)
# tiny_page_1 is refused, see below, and so are queries in float32 with pages of bytes.
SMALL = [c for c in CASES if c.name.startswith("tiny") and c.name != "tiny_page_1"]
LARGE = [c for c in CASES if not c.name.startswith("tiny") and c.name != "everything_int8"]


def name_of(value: object) -> str | None:
    """Of a case, for a test's id; pytest makes others."""
    return value.name if isinstance(value, Case) else None


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few pages, in several chunks, so that short rows have many."""
    monkeypatch.setattr(tpu_layout, "BLOCK_TOKENS", 32)
    monkeypatch.setattr(tpu_layout, "CHUNK_ROWS", 64)
    monkeypatch.setattr(tpu_prefill_layout, "TILE", 32)
    monkeypatch.setattr(tpu_prefill_layout, "ROWS", 64)
    monkeypatch.setattr(tpu_prefill_layout, "ROW_PIECE", 32)
    monkeypatch.setattr(tpu_prefill_layout, "SMALLEST_ROWS", 8)
    monkeypatch.setattr(tpu_prefill_layout, "BLOCK_TOKENS", 256)
    monkeypatch.setattr(tpu_prefill_layout, "WIDTH_STEP", 64)
    monkeypatch.setattr(tpu_prefill_layout, "PIECE_TOKENS", 64)


def facts(setup: Setup, platform: str = "tpu", **changes: object) -> registry.Facts:
    """What the registry would be told for this setup."""
    case, dtype = setup.case, str(setup.dtype)
    values = {
        "q": registry.ArrayFacts(setup.q.shape, dtype),
        "k": registry.ArrayFacts(setup.k.shape, dtype),
        "pages": registry.ArrayFacts(setup.pool("tpu").shape, str(setup.pages_dtype)),
        "table": registry.ArrayFacts(setup.table.shape, "int32"),
        "decode_only": setup.rows.ragged().decode_only,
        "window": case.window,
    } | changes
    return registry.Facts(platform, "TPU v6 lite", tuple(sorted(values.items())))


@functools.cache
def _jitted(options: tuple, interpret: bool | pltpu.InterpretParams):
    call = functools.partial(mosaic_tpu.paged_attention, interpret=interpret, **dict(options))
    return jax.jit(functools.partial(run_scaled, call))


def check(setup: Setup, interpret: bool | pltpu.InterpretParams = True) -> None:
    """The output against the oracle, and every page: what no token wrote stays NaN."""
    call = _jitted(tuple(setup.options.items()), interpret)
    q, k, v = (jnp.asarray(x, setup.dtype) for x in (setup.q, setup.k, setup.v))
    pages = setup.pool("tpu").astype(setup.pages_dtype)
    table, ragged = jnp.asarray(setup.table), setup.rows.ragged()
    out, after = call(q, k, v, pages, table, ragged, **setup.arrays)
    assert out.dtype == setup.dtype and after.dtype == pages.dtype
    atol = setup.case.atol + (WEIGHTS_ATOL if setup.dtype == jnp.bfloat16 else 0.0)
    setup.check_output(out, atol)
    np.testing.assert_array_equal(setup.values(after)[1:], setup.after[1:])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_shapes(case: Case, batch: str) -> None:
    setup = Setup(case, BATCHES[batch])
    check(setup)


@pytest.mark.slow
@pytest.mark.parametrize("case", (*LARGE, *MORE), ids=lambda case: case.name)
def test_model_shapes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_layout, "CHUNK_ROWS", 512)
    setup = Setup(case, Rows(decode=(0, 70, 140), pad_rows=1))
    assert mosaic_tpu.refuses(facts(setup)) is None
    check(setup)


@pytest.mark.slow
@pytest.mark.parametrize("case", (*LARGE, *MORE, *GROUPS), ids=lambda case: case.name)
def test_mixed_model_shapes(case: Case) -> None:
    setup = Setup(case, MIXED)
    assert mosaic_tpu.refuses(facts(setup)) is None
    check(setup)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (BYTES[0], "int8"),
        pytest.param(BYTES[0], "float8_e4m3fn", marks=pytest.mark.slow),
        *(
            pytest.param(case, dtype, marks=pytest.mark.slow)
            for case in BYTES[1:]
            for dtype in ("int8", "float8_e4m3fn")
        ),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_pages_of_bytes(case: Case, dtype: str) -> None:
    setup = Setup(replace(case, pages_dtype=dtype), MIXED)
    assert mosaic_tpu.refuses(facts(setup)) is None
    check(setup)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("case", "rows", "value"), SPOILED, ids=name_of)
def test_what_is_not_finite_stays_in_its_row(
    case: Case, rows: Rows, value: float, first: int
) -> None:
    """Keys and values that stay in vector memory when shorter rows come."""
    setup = Setup(case, rows)
    setup.spoil(range(first, len(setup.rows.all), 2), value)
    check(setup)


@pytest.mark.slow
@pytest.mark.parametrize("batch", PREFILLS)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_prefills(case: Case, batch: str) -> None:
    check(Setup(case, PREFILLS[batch]))


@pytest.mark.slow
def test_blocks_as_they_are_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    setup = Setup(CASE["gemma3_270m_local"], Rows(decode=(511, 512, 513, 1300)))
    check(setup)


@pytest.mark.parametrize("case", ["tiny", "tiny_window"])
def test_the_smallest_block_that_can_be_tuned(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pick(name: str, shape: Sequence[int], candidates: Sequence[int], default: int) -> int:
        asked.append(candidates[0] < default)
        return candidates[0]

    monkeypatch.setattr(tuning, "pick", pick)
    monkeypatch.setattr(tpu_layout, "CHUNK_ROWS", 16)
    _jitted.cache_clear()  # what was traced has blocks already
    check(Setup(CASE[case], Rows(decode=(45, 0, 9), pad_rows=1)))
    _jitted.cache_clear()
    assert asked and all(asked)


def interpreter(mode: Literal["on_wait", "eager"]) -> pltpu.InterpretParams:
    """The interpreter at its strictest."""
    return pltpu.InterpretParams(
        detect_races=True,
        dma_execution_mode=mode,
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
    )


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("case", RACES, ids=name_of)
@pytest.mark.timeout(300)
def test_copies(
    case: Case,
    mode: Literal["on_wait", "eager"],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Rows of more blocks than slots, and more rows than a grid step has."""
    monkeypatch.setattr(tpu_layout, "BLOCK_TOKENS", 8)
    monkeypatch.setattr(tpu_decode, "ROWS_PER_STEP", 2)
    check(Setup(case, Rows(decode=(45, 0, 9), pad_rows=1)), interpreter(mode))
    assert RACE not in capfd.readouterr().out


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("case", PREFILL_RACES, ids=name_of)
@pytest.mark.timeout(300)
def test_copies_of_prefill(
    case: Case,
    mode: Literal["on_wait", "eager"],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Tiles of more blocks than slots, rows of more tiles than one, and what no row owns."""
    monkeypatch.setattr(tpu_prefill_layout, "TILE", 16)
    rows = Rows(decode=(9,), prefill=((260, 21), (0, 3)), pad_rows=1, pad_tokens=19)
    check(Setup(case, rows), interpreter(mode))
    assert RACE not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        (
            "gemma2_9b",
            {"decode_only": False, "pages": PAGES_OF_48},
            "power of two of tokens, not 48",
        ),
        ("gemma2_9b", {"q": registry.ArrayFacts((1, 16, 256), "bfloat16")}, "q must be float32"),
        ("tiny", {"pages": registry.ArrayFacts((9, 4, 4, 8), "uint16")}, "not uint16"),
        (
            "gemma3_270m_local",
            {"pages": registry.ArrayFacts((9, 16, 2, 256), "float8_e4m3fn")},
            "tiles float8_e4m3fn pages (9, 16, 2, 256)",
        ),
        ("gemma2_9b", {"table": registry.ArrayFacts((256, 4096), "int32")}, "scalar memory"),
        ("tiny", {"pages": registry.ArrayFacts((9, 1, 2, 128), "float32")}, "a page of 1 tokens"),
        ("olmo_hybrid_7b", {"pages": registry.ArrayFacts((9, 16, 60, 128), "float32")}, "on TPU"),
        (
            "gpt_oss_20b_local",
            {"pages": registry.ArrayFacts((9, 16, 16, 64), "bfloat16")},
            "(9, 16, 8, 128) on TPU",
        ),
        (
            "gemma2_9b",
            {"pages": registry.ArrayFacts((9, 1024, 16, 256), "float32")},
            "vector memory",
        ),
    ],
)
def test_refusals_have_reasons(case: str, changes: dict, reason: str) -> None:
    refused = mosaic_tpu.refuses(facts(Setup(CASE[case], Rows(decode=(3,))), **changes))
    assert refused is not None and reason in refused


def test_forced_on_cpu_is_an_error_with_the_reason() -> None:
    setup = Setup(CASE["tiny"], Rows(decode=(3,)))
    arrays = (jnp.asarray(x, setup.dtype) for x in (setup.q, setup.k, setup.v, setup.before))
    with pytest.raises(ValueError, match="mosaic_tpu cannot run on cpu: is for tpu, not for cpu"):
        paged_attention(
            *arrays, jnp.asarray(setup.table), setup.rows.ragged(), scale=1.0,
            implementation="mosaic_tpu",
        )  # fmt: skip
