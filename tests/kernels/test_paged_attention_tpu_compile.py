"""paged_attention compiles for every TPU generation, and updates its pages in place."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import RaggedBatch, registry
from pallas_kernels.paged_attention import api, paged_attention, pages_shape
from pallas_kernels.paged_attention.cases import CASES, Case
from tests.helpers.tpu import EVERY_CHIP, check_in_place, compile_for, needs_libtpu, results

pytestmark = needs_libtpu
ROWS = 16
TOKENS = 512
CONTEXT = 4096
KERNELS = ("paged_attention_write", "paged_attention_decode")
CASE = {case.name: case for case in CASES} | {
    case.name: case
    for case in (
        Case("llama3_8b", 32, 8, 128, 16, dtype="bfloat16"),
        Case("qwen3_next_bf16_128", 16, 2, 256, 128, dtype="bfloat16"),
        Case("group_16", 32, 2, 128, 64, window=1024, sinks=True, softcap=20.0, dtype="bfloat16"),
        Case("dim_512", 8, 4, 512, 32, dtype="bfloat16"),
        Case("page_256", 24, 12, 128, 256, dtype="bfloat16"),
        Case("phi3_mini", 32, 32, 96, dtype="bfloat16"),
        Case("3_heads_of_80", 6, 3, 80, dtype="bfloat16"),
    )
}
NAMES = (
    "gemma3_270m_local",
    "gemma3_27b_global",
    "gemma2_9b",
    "qwen35_9b",
    "qwen3_next_80b",
    "llama3_8b",
    "qwen3_next_bf16_128",
    "group_16",
    "dim_512",
    "page_256",
    "gpt_oss_20b_local",
    "phi3_mini",
    "3_heads_of_80",
    "olmo_hybrid_7b",
)
PREFILL_NAMES = ("qwen3_next_bf16_128", "llama3_8b", "group_16")


def shape(dtype: str, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))


def arguments(
    case: Case, rows: int, tokens: int | None = None, platform: str = "tpu"
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k, v, pages, table, row boundaries and sinks of a batch; without `tokens`, of decode.

    The pool is larger than any VMEM, where XLA would otherwise put it.
    """
    seen = case.window or CONTEXT
    width = -(-seen // case.page_size) + 1
    page = pages_shape(1, case.page_size, case.num_kv_heads, case.head_dim, platform)
    item = jnp.dtype(case.dtype).itemsize
    num_pages = (256 << 20) // (page[1] * page[2] * page[3] * item)
    tokens = tokens or rows
    kv = shape(case.dtype, tokens, case.num_kv_heads, case.head_dim)
    return (
        shape(case.dtype, tokens, case.num_heads, case.head_dim),
        kv,
        kv,
        shape(case.dtype, num_pages, *page[1:]),
        *(shape("int32", *dims) for dims in ((rows, width), (rows + 1,), (rows,), (2,))),
        shape("float32", case.num_heads),
    )


def attention(case: Case, decode_only: bool):
    call = functools.partial(
        paged_attention,
        scale=case.head_dim**-0.5,
        window=case.window,
        softcap=case.softcap,
        implementation="mosaic_tpu",
    )

    def run(q, k, v, pages, table, starts, lens, counts, sinks):
        ragged = RaggedBatch(starts, lens, counts, decode_only)
        return call(q, k, v, pages, table, ragged, sinks=sinks if case.sinks else None)

    return run


@pytest.mark.parametrize("chip", EVERY_CHIP)
@pytest.mark.parametrize("name", NAMES)
def test_decode(name: str, chip: str) -> None:
    given = arguments(CASE[name], ROWS)
    compiled = compile_for(chip, attention(CASE[name], True), given, donate=(3,))
    check_in_place(compiled, given[3], KERNELS)


@pytest.mark.parametrize("chip", EVERY_CHIP)
@pytest.mark.parametrize("name", PREFILL_NAMES)
def test_mixed(name: str, chip: str) -> None:
    given = arguments(CASE[name], ROWS, TOKENS)
    compiled = compile_for(chip, attention(CASE[name], False), given, donate=(3,))
    check_in_place(compiled, given[3], (*KERNELS, "paged_attention_prefill"))
    # Queries and output are moved (XLA may prefetch what is small), but not laid out anew.
    makers = {opcode for opcode, dims in results(compiled) if dims == given[0].shape}
    assert not makers & {"transpose", "copy", "fusion", "pad"}, makers


@pytest.mark.parametrize("chip", EVERY_CHIP)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3_next_bf16_128", "float8_e4m3fn"),
        ("llama3_8b", "int8"),
        pytest.param("qwen3_next_bf16_128", "int8", marks=pytest.mark.slow),
        pytest.param("llama3_8b", "float8_e4m3fn", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "tokens", [None, pytest.param(TOKENS, marks=pytest.mark.slow)], ids=["decode", "mixed"]
)
def test_pages_of_bytes(tokens: int | None, dtype: str, name: str, chip: str) -> None:
    given = list(arguments(CASE[name], ROWS, tokens))
    given[3] = shape(dtype, 2 * given[3].shape[0], *given[3].shape[1:])
    compiled = compile_for(chip, attention(CASE[name], tokens is None), given, donate=(3,))
    kernels = KERNELS if tokens is None else (*KERNELS, "paged_attention_prefill")
    check_in_place(compiled, given[3], kernels)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss_20b_local", "3_heads_of_80"])
def test_mixed_with_rows_filled_up(name: str) -> None:
    given = arguments(CASE[name], ROWS, TOKENS)
    compiled = compile_for("v6e", attention(CASE[name], False), given, donate=(3,))
    check_in_place(compiled, given[3], (*KERNELS, "paged_attention_prefill"))


def test_the_registry_chooses_it_for_a_tpu() -> None:
    case = CASE["qwen35_9b"]

    def run(q, k, v, pages, table, starts, lens, counts, sinks):
        del sinks
        ragged = RaggedBatch(starts, lens, counts, decode_only=True)
        return paged_attention(q, k, v, pages, table, ragged, scale=1.0)

    compiled = compile_for("v6e", run, arguments(case, ROWS), donate=(3,))
    check_in_place(compiled, arguments(case, ROWS)[3], KERNELS)
    chosen = [choice for choice in registry.report() if choice.op == api.OP]
    assert chosen[-1].implementation == "mosaic_tpu"
