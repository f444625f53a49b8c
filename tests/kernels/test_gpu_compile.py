"""Triton kernels compile for GPUs of three generations, and update their pools in place."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import RaggedBatch, registry
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import Case as AttentionCase
from pallas_kernels.paged_attention.gpu_decode import Tiles
from tests.helpers.gpu import EVERY_GPU, compile_for, needs_cuda
from tests.helpers.tpu import check_in_place
from tests.kernels.test_paged_attention_tpu_compile import CASE as ATTENTION
from tests.kernels.test_paged_attention_tpu_compile import arguments as attention_arguments

pytestmark = needs_cuda
TRITON_GPU = "triton_gpu"


def attention(case: AttentionCase):
    call = functools.partial(
        paged_attention, scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap
    )

    def run(q, k, v, pages, table, starts, lens, counts, sinks):
        ragged = RaggedBatch(starts, lens, counts, decode_only=True)
        return call(q, k, v, pages, table, ragged, sinks=sinks if case.sinks else None)

    return run


@pytest.mark.parametrize("chip", EVERY_GPU)
@pytest.mark.parametrize(
    ("name", "rows", "parts"),
    [
        ("gemma3_270m_local", 1, 8),
        ("gemma2_9b", 256, 1),
        ("qwen35_9b", 64, 2),
        ("qwen3_next_bf16_128", 1, 32),
        ("olmo_hybrid_7b", 8, 4),
        ("gpt_oss_20b_local", 256, 1),
        ("group_16", 256, 1),
        ("page_256", 64, 1),
    ],
)
def test_paged_attention_decode(name: str, rows: int, parts: int, chip: str) -> None:
    given = attention_arguments(ATTENTION[name], rows)
    q, _, _, pages, table, *_ = given
    assert Tiles.of(q, pages, table.shape[1], ATTENTION[name].window).parts == parts
    compile_attention(ATTENTION[name], given, chip)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["h100", "b200"])
def test_paged_attention_decode_float8(chip: str) -> None:
    case = ATTENTION["qwen35_9b"]
    q, k, v, pages, *rest = attention_arguments(case, 64)
    pages = jax.ShapeDtypeStruct(pages.shape, jnp.float8_e4m3fn)
    compile_attention(case, (q, k, v, pages, *rest), chip)


def compile_attention(case: AttentionCase, given: tuple, chip: str) -> None:
    with registry.recording() as choices:
        compiled = compile_for(chip, attention(case), given, donate=(3,))
    assert [choice.implementation for choice in choices] == [TRITON_GPU]
    check_in_place(compiled, given[3], ("paged_attention_decode",))
