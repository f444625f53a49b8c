"""The Triton kernels of paged attention, interpreted on CPU, on the cases of the reference.

The interpreter checks what is computed. It does not see shared memory, registers or the rounding of
tensor cores: `test_gpu_compile.py` and the device suite do.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpu_chip, registry
from pallas_kernels.paged_attention import gpu_decode, paged_attention, triton_gpu
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.scales import run_scaled
from tests.helpers.ragged import Rows
from tests.kernels.test_paged_attention import Setup

# Weights are multiplied as bfloat16, too: each is off by up to 2^-9 of itself, and so is the
# average of values below 2, beside the rounding of the output that `Case.atol` allows for.
WEIGHTS_ATOL = 2 * 2**-9
CASE = {case.name: case for case in CASES}
NUM_ROWS = 9
BATCHES = {
    "all_ages": Rows(decode=(0, 1, 7, 8, 9, 130, 300), pad_rows=2),
    "full": Rows(decode=(3, 40, 5, 0, 1, 2, 33, 9, 60)),
    "padding": Rows(pad_rows=9),
}
MIXED_BATCHES = {
    "prompts": Rows(prefill=((0, 1), (0, 1), (5, 1)), pad_rows=1),
    "mixed": Rows(decode=(3, 150), prefill=((0, 31), (2, 64), (0, 65), (140, 40)), pad_rows=2,
                  pad_tokens=5),
    "long_prefill": Rows(prefill=((0, 200), (31, 129)), pad_tokens=90),
    "decode_in_a_mixed_bucket": Rows(decode=(0, 1, 40), pad_rows=1, pad_tokens=20),
    "padding_mixed": Rows(pad_rows=4, pad_tokens=9),
}  # fmt: skip
# What the models in cases.py leave out: other head sizes, groups and pages.
MORE = (
    Case("dim_80", 2, 2, 80, window=20),
    Case("dim_96_bf16", 16, 1, 96, dtype="bfloat16", atol=8e-3),
    Case("group_20_bf16", 20, 1, 32, sinks=True, dtype="bfloat16", atol=8e-3),
    Case(
        "group_16_page_64_bf16", 32, 2, 64, 64, window=70, sinks=True, dtype="bfloat16", atol=8e-3
    ),
    Case("page_256_bf16", 8, 4, 128, 256, softcap=30.0, dtype="bfloat16", atol=8e-3),
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 tokens, so that short rows have many; several rows' programs fill the GPU."""
    monkeypatch.setattr(gpu_decode, "BLOCK_TOKENS", 16)
    monkeypatch.setattr(gpu_chip, "PROGRAMS", 8 * NUM_ROWS)


@functools.cache
def _jitted(options: tuple, programs: int):
    del programs  # what is traced depends on it
    call = functools.partial(triton_gpu.paged_attention, interpret=True, **dict(options))
    return jax.jit(functools.partial(run_scaled, call))


def check(setup: Setup) -> None:
    """The output against the oracle, and every page: what no token wrote stays NaN."""
    arrays = (setup.q, setup.k, setup.v)
    q, k, v = (jnp.asarray(x, setup.dtype) for x in arrays)
    pages = jnp.asarray(setup.before, setup.pages_dtype)
    call = _jitted(tuple(setup.options.items()), gpu_chip.PROGRAMS)
    table, ragged = jnp.asarray(setup.table), setup.rows.ragged()
    out, after = call(q, k, v, pages, table, ragged, **setup.arrays)
    assert out.dtype == setup.dtype and after.dtype == pages.dtype
    atol = setup.case.atol + (WEIGHTS_ATOL if setup.dtype == jnp.bfloat16 else 0.0)
    setup.check_output(out, atol)
    np.testing.assert_array_equal(np.asarray(after, np.float64), setup.after)


def small(case: Case, batch: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_chip, "PROGRAMS", parts * NUM_ROWS * case.num_kv_heads)
    check(Setup(case, (BATCHES | MIXED_BATCHES)[batch], seed=parts))


@pytest.mark.parametrize(
    ("batch", "parts"), [("all_ages", 1), ("all_ages", 4), ("padding", 4), ("mixed", 1)]
)
def test_small_shapes(batch: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small(CASE["tiny_everything"], batch, parts, monkeypatch)


@pytest.mark.parametrize(("batch", "parts"), [("all_ages", 4), ("mixed", 1)])
@pytest.mark.parametrize("first", [0, 1])
def test_what_is_not_finite_stays_in_its_row(
    first: int, batch: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASE["tiny_everything"]
    monkeypatch.setattr(gpu_chip, "PROGRAMS", parts * NUM_ROWS * case.num_kv_heads)
    setup = Setup(case, (BATCHES | MIXED_BATCHES)[batch])
    setup.spoil(range(first, len(setup.rows.all), 2), np.nan)
    check(setup)


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("name", ["tiny", "tiny_window", "tiny_page_1"])
def test_more_small_shapes(
    name: str, parts: int, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(CASE[name], batch, parts, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch"),
    [(name, "mixed") for name in CASE if name.startswith("tiny")]
    + [("tiny_everything", batch) for batch in MIXED_BATCHES if batch != "mixed"],
)
def test_small_shapes_of_prefill(name: str, batch: str) -> None:
    check(Setup(CASE[name], MIXED_BATCHES[batch]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "tiny_everything"])
def test_random_rows(name: str) -> None:
    rng = np.random.default_rng(5)
    for seed in range(4):
        count = int(rng.integers(0, NUM_ROWS + 1))
        rows = Rows(tuple(int(n) for n in rng.integers(0, 90, size=count)))
        check(Setup(CASE[name], rows.padded(NUM_ROWS, NUM_ROWS), seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*(c for c in CASES if not c.name.startswith("tiny")), *MORE], ids=lambda c: c.name
)
def test_model_shapes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks as they are on a device."""
    monkeypatch.undo()
    monkeypatch.setattr(gpu_chip, "PROGRAMS", 2 * case.num_kv_heads)
    earlier = (case.window or 140) + 30
    check(Setup(case, Rows(decode=(earlier,), pad_rows=1)))
    check(Setup(case, Rows(decode=(9,), prefill=((earlier, 40), (0, 140)), pad_tokens=3)))


@pytest.mark.parametrize(
    ("dtype", "batch"),
    [
        ("int8", "mixed"),
        pytest.param("int8", "all_ages", marks=pytest.mark.slow),
        pytest.param("float8_e4m3fn", "mixed", marks=pytest.mark.slow),
        pytest.param("float8_e4m3fn", "all_ages", marks=pytest.mark.slow),
    ],
)
def test_pages_of_bytes(dtype: str, batch: str) -> None:
    case = replace(CASE["tiny_everything"], pages_dtype=dtype)
    check(Setup(case, (BATCHES | MIXED_BATCHES)[batch]))


def facts(setup: Setup, **changes: object) -> registry.Facts:
    """What the registry would be told for this setup."""
    dtype = str(setup.dtype)
    values = {
        "q": registry.ArrayFacts(setup.q.shape, dtype),
        "pages": registry.ArrayFacts(setup.before.shape, str(setup.pages_dtype)),
        "decode_only": setup.rows.ragged().decode_only,
    } | changes
    platform, kind = values.pop("platform", "gpu"), values.pop("kind", "NVIDIA H100 80GB HBM3")
    return registry.Facts(str(platform), str(kind), tuple(sorted(values.items())))


@pytest.mark.parametrize("case", (*CASES, *MORE), ids=lambda case: case.name)
def test_takes_every_model(case: Case) -> None:
    for rows in (Rows(decode=(3,)), Rows(prefill=((3, 5),))):
        assert triton_gpu.refuses(facts(Setup(case, rows))) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "Tesla T4"}, "A100, H100, H200, B200 only, not for 'Tesla T4'"),
        (
            {"decode_only": False, "q": registry.ArrayFacts((1, 80, 8), "float32")},
            "40 query heads per KV head are above 16 for float32 prefill",
        ),
        ({"q": registry.ArrayFacts((1, 4, 8), "float16")}, "not float16"),
        ({"pages": registry.ArrayFacts((9, 4, 4, 8), "bfloat16")}, "float32 as q"),
        (
            {
                "pages": registry.ArrayFacts((9, 4, 4, 8), "float8_e4m3fn"),
                "kind": "NVIDIA A100-SXM4-80GB",
            },
            "A100 has no float8",
        ),
        ({"pages": registry.ArrayFacts((20 << 20, 4, 4, 8), "float8_e4m3fn")}, "32 bits"),
        ({"pages": registry.ArrayFacts((20 << 20, 4, 4, 8), "int8")}, "32 bits"),
        ({"q": registry.ArrayFacts((1, 4, 512), "float32")}, "head dim 512"),
        ({"q": registry.ArrayFacts((1, 256, 8), "float32")}, "128 query heads per KV head"),
    ],
)
def test_refusals_have_reasons(changes: dict, reason: str) -> None:
    refused = triton_gpu.refuses(facts(Setup(CASE["tiny"], Rows(decode=(3,))), **changes))
    assert refused is not None and reason in refused


def test_forced_on_cpu_is_an_error_with_the_reason() -> None:
    setup = Setup(CASE["tiny"], Rows(decode=(3,)))
    arrays = (jnp.asarray(x, setup.dtype) for x in (setup.q, setup.k, setup.v, setup.before))
    with pytest.raises(ValueError, match="triton_gpu cannot run on cpu: is for gpu, not for cpu"):
        paged_attention(
            *arrays, jnp.asarray(setup.table), setup.rows.ragged(), scale=1.0,
            implementation="triton_gpu",
        )  # fmt: skip
