"""Triton kernels compile for GPUs of three generations without spilling registers, and update their
pools in place.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import RaggedBatch, registry
from pallas_kernels.causal_conv1d import causal_conv1d, state_shape
from pallas_kernels.causal_conv1d.cases import CASES as CONVOLUTION_CASES
from pallas_kernels.gla import gla
from pallas_kernels.gla.cases import CASES as GLA_CASES
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import Case as AttentionCase
from pallas_kernels.paged_attention.gpu_decode import Tiles
from tests.helpers.gpu import EVERY_GPU, GPUS, compile_for, needs_cuda
from tests.helpers.tpu import check_in_place
from tests.kernels.test_paged_attention_tpu_compile import CASE as ATTENTION
from tests.kernels.test_paged_attention_tpu_compile import arguments as attention_arguments
from tests.kernels.test_tpu_compile import (
    GATED_DELTA,
    RWKV7,
    SCAN,
    SSD,
    batch_arguments,
    gated_delta,
    gated_delta_arguments,
    run_rwkv7,
    run_scan,
    run_ssd,
    rwkv7_arguments,
    scan_arguments,
    shape,
    ssd_arguments,
)

pytestmark = needs_cuda
TRITON_GPU = "triton_gpu"
DECODE = "paged_attention_decode"
PREFILL = "paged_attention_write", "paged_attention_prefill"
CONVOLUTION = {case.name: case for case in CONVOLUTION_CASES}


def attention(case: AttentionCase, decode_only: bool):
    call = functools.partial(
        paged_attention, scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap
    )

    def run(q, k, v, pages, table, starts, lens, counts, sinks):
        ragged = RaggedBatch(starts, lens, counts, decode_only)
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
    given = attention_arguments(ATTENTION[name], rows, platform="gpu")
    q, _, _, pages, table, *_ = given
    assert Tiles.of(q, pages, table, ATTENTION[name].window).parts == parts
    check_compiles(attention(ATTENTION[name], True), given, 3, (DECODE,), chip)


@pytest.mark.parametrize("chip", EVERY_GPU)
@pytest.mark.parametrize(("name", "tokens"), [("gemma3_270m_local", 4096), ("group_16", 512)])
def test_paged_attention_prefill(name: str, tokens: int, chip: str) -> None:
    given = attention_arguments(ATTENTION[name], 16, tokens, platform="gpu")
    check_compiles(attention(ATTENTION[name], False), given, 3, (DECODE, *PREFILL), chip)


@pytest.mark.slow
@pytest.mark.parametrize("chip", GPUS)
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("gemma2_9b", 2048),
        ("qwen35_9b", 512),
        ("qwen3_next_80b", 512),
        ("olmo_hybrid_7b", 2048),
        ("gpt_oss_20b_local", 8192),
        ("llama3_8b", 8192),
        ("3_heads_of_80", 8192),
        ("page_256", 512),
    ],
)
def test_paged_attention_prefill_of_more_models(name: str, tokens: int, chip: str) -> None:
    test_paged_attention_prefill(name, tokens, chip)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, chip", [
    ("float8_e4m3fn", "h100"), ("float8_e4m3fn", "b200"),
    ("int8", "a100"), ("int8", "h100"), ("int8", "b200"),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [64, 4096])
def test_paged_attention_on_pages_of_bytes(tokens: int, dtype: str, chip: str) -> None:
    case, decode_only = ATTENTION["qwen35_9b"], tokens == 64
    q, k, v, pages, *rest = attention_arguments(case, 64, tokens, platform="gpu")
    pages = jax.ShapeDtypeStruct(pages.shape, dtype)
    k = v = jax.ShapeDtypeStruct(k.shape, jnp.float32)  # as scales leave them
    kernels = (DECODE, *(() if decode_only else PREFILL))
    check_compiles(attention(case, decode_only), (q, k, v, pages, *rest), 3, kernels, chip)


@pytest.mark.parametrize("chip", EVERY_GPU)
@pytest.mark.parametrize(
    ("name", "rows"),
    [("qwen35_9b", 256), ("qwen3_next_80b", 1), ("kimi_linear_48b", 64), ("olmo_hybrid_7b", 64)],
)
def test_gated_delta_rule_decode(name: str, rows: int, chip: str) -> None:
    case = GATED_DELTA[name]
    given = gated_delta_arguments(case, rows, rows)
    check_compiles(gated_delta(case, True), given, 5, ("gated_delta_decode",), chip)


@pytest.mark.parametrize("chip", EVERY_GPU)
@pytest.mark.parametrize(
    ("name", "kernels"),
    [("qwen35_9b", ("gated_delta_scores",)), ("kimi_linear_48b", ("channel_decay",))],
)
def test_gated_delta_rule_prefill(name: str, kernels: tuple[str, ...], chip: str) -> None:
    case = GATED_DELTA[name]
    given = gated_delta_arguments(case, 1024, 64)
    kernels = "gated_delta_decode", *kernels, "gated_delta_inverse", "gated_delta_prefill"
    check_compiles(gated_delta(case, False), given, 5, kernels, chip)


@pytest.mark.parametrize("chip", EVERY_GPU)
@pytest.mark.parametrize(
    ("name", "rows"), [("nemotron_3_nano", 64), ("bamba_9b", 1), ("falcon_h1_7b", 256)]
)
def test_ssd_decode(name: str, rows: int, chip: str) -> None:
    given = ssd_arguments(SSD[name], rows, rows)
    check_compiles(run_ssd(SSD[name], True), given, 7, ("ssd_decode",), chip)


@pytest.mark.parametrize("chip", EVERY_GPU)
@pytest.mark.parametrize("name", ["nemotron_3_nano", "falcon_h1_7b"])
def test_ssd_prefill(name: str, chip: str) -> None:
    given = ssd_arguments(SSD[name], 1024, 64)
    check_compiles(run_ssd(SSD[name], False), given, 7, ("ssd_decode", "ssd_prefill"), chip)


def gla_call(
    name: str, tokens: int, rows: int, **changes: Any
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """A function of arrays, and their shapes."""
    case = replace({case.name: case for case in GLA_CASES}[name], **changes)
    keys = shape(case.dtype, tokens, case.num_k_heads, case.k_dim)
    values = shape(case.dtype, tokens, case.num_v_heads, case.v_dim)
    decays = shape("float32", tokens, case.num_v_heads, *[case.k_dim] * case.per_channel)
    state = shape("float32", 2 * rows + 1, case.num_v_heads, case.k_dim, case.v_dim)

    def run(q, k, v, g, state, starts, lens, counts, read, write):
        ragged = RaggedBatch(starts, lens, counts, tokens == rows)
        return gla(q, k, v, g, state, ragged, read, write)

    return run, (keys, keys, values, decays, state, *batch_arguments(rows))


@pytest.mark.parametrize("chip", EVERY_GPU)
@pytest.mark.parametrize(("name", "rows"), [("minimax_text_01", 64), ("gla_1b", 1)])
def test_gla_decode(name: str, rows: int, chip: str) -> None:
    check_compiles(*gla_call(name, rows, rows), 4, ("gla_decode",), chip)


@pytest.mark.parametrize("chip", EVERY_GPU)
@pytest.mark.parametrize(
    ("name", "kernels"), [("minimax_text_01", ()), ("gla_1b", ("channel_decay",))]
)
def test_gla_prefill(name: str, kernels: tuple[str, ...], chip: str) -> None:
    call = gla_call(name, 1024, 64)
    check_compiles(*call, 4, ("gla_decode", *kernels, "gla_prefill"), chip)


@pytest.mark.parametrize("chip", EVERY_GPU)
@pytest.mark.parametrize("rows", [1, 64])
def test_rwkv7_decode(rows: int, chip: str) -> None:
    case = RWKV7["rwkv7_2b9"]
    given = rwkv7_arguments(case, rows, rows)
    check_compiles(run_rwkv7(case, True), given, 6, ("rwkv7_decode",), chip)


@pytest.mark.parametrize("chip", EVERY_GPU)
@pytest.mark.parametrize("rows", [1, 64])
def test_selective_scan_decode(rows: int, chip: str) -> None:
    given = scan_arguments(SCAN["falcon_mamba_7b"], rows, rows)
    check_compiles(run_scan(True), given, 7, ("selective_scan_decode",), chip)


@pytest.mark.parametrize("chip", EVERY_GPU)
@pytest.mark.parametrize(
    ("name", "rows", "tokens"),
    [
        ("qwen35_9b", 64, 64),
        ("olmo_hybrid_7b", 1, 1),
        ("qwen35_9b", 16, 2048),
        ("olmo_hybrid_7b", 16, 512),
    ],
)
def test_causal_conv1d(name: str, rows: int, tokens: int, chip: str) -> None:
    case, decode_only = CONVOLUTION[name], tokens == rows
    x, weight, state = (
        shape(case.dtype, *dims)
        for dims in (
            (tokens, case.channels),
            (case.channels, case.width),
            # Larger than the output of a prefill.
            (max(2 * rows, tokens) + 1, *state_shape(1, case.width - 1, case.channels)[1:]),
        )
    )

    def run(x, weight, state, starts, lens, counts, read, write):
        ragged = RaggedBatch(starts, lens, counts, decode_only)
        return causal_conv1d(x, weight, None, state, ragged, read, write, activation="silu")

    prefill = () if decode_only else ("causal_conv1d_prefill", "causal_conv1d_tails")
    given = x, weight, state, *batch_arguments(rows)
    check_compiles(run, given, 2, ("causal_conv1d_decode", *prefill), chip)


@pytest.mark.parametrize("chip", EVERY_GPU)
@pytest.mark.parametrize("op", ["gated_delta", "kda", "gla", "rwkv7", "selective_scan", "ssd"])
def test_prefill_token_by_token(op: str, chip: str) -> None:
    """Of float32 inputs, whose products no kernel takes, and of ops without a form in products."""

    def exact(cases: Mapping[str, Any], name: str) -> Any:
        return replace(cases[name], dtype="float32")

    delta, channel_delta, ssd_case, rwkv7_case = (
        exact(GATED_DELTA, "qwen3_next_80b"), exact(GATED_DELTA, "kimi_linear_48b"),
        exact(SSD, "bamba_9b"), RWKV7["rwkv7_2b9"],
    )  # fmt: skip
    fn, given, pool = {
        "gated_delta": (gated_delta(delta, False), gated_delta_arguments(delta, 256, 64), 5),
        "kda": (
            gated_delta(channel_delta, False), gated_delta_arguments(channel_delta, 256, 64), 5
        ),
        "gla": (*gla_call("gla_1b", 256, 64, dtype="float32"), 4),
        "rwkv7": (run_rwkv7(rwkv7_case, False), rwkv7_arguments(rwkv7_case, 256, 64), 6),
        "selective_scan": (run_scan(False), scan_arguments(SCAN["falcon_mamba_7b"], 256, 64), 7),
        "ssd": (run_ssd(ssd_case, False), ssd_arguments(ssd_case, 256, 64), 7),
    }[op]  # fmt: skip
    name = "gated_delta" if op == "kda" else op
    implementation = TRITON_GPU if op in ("rwkv7", "selective_scan") else f"{TRITON_GPU}_recurrent"
    check_compiles(fn, given, pool, (f"{name}_recurrent",), chip, implementation)


def check_compiles(
    fn: Callable[..., Any], given: Sequence[Any], pool: int, kernels: Sequence[str], chip: str,
    implementation: str = TRITON_GPU,
) -> None:  # fmt: skip
    """The registry chooses Triton, and argument number `pool` is updated in place."""
    with registry.recording() as choices:
        compiled = compile_for(chip, fn, given, donate=(pool,))
    assert [choice.implementation for choice in choices] == [implementation]
    check_in_place(compiled, given[pool], kernels)
