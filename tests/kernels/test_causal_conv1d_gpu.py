"""The Triton kernel of causal_conv1d, interpreted on CPU, against the float64 oracle."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest

from pallas_kernels import platform
from pallas_kernels.causal_conv1d import gpu_decode, triton_gpu
from pallas_kernels.causal_conv1d.cases import CASES, Case
from pallas_kernels.registry import Facts
from tests.helpers.ragged import Rows
from tests.kernels.test_causal_conv1d import check_call

SMALL = [case for case in CASES if case.name.startswith("tiny")]
BATCHES = {
    "all_ages": Rows(decode=(0, 1, 2, 3, 4, 90), pad_rows=2),
    "full": Rows(decode=(5, 0, 0, 1, 9, 2, 3, 4)),
    "padding": Rows(pad_rows=8),
}
# More channels than a program has, and no power of two of them.
WIDE_BF16 = Case("wide_bf16", 700, 3, bias=True, dtype="bfloat16", atol=3.2e-2)


@functools.cache
def _jitted(activation: str | None) -> Callable[..., Any]:
    return jax.jit(
        functools.partial(triton_gpu.causal_conv1d, activation=activation, interpret=True)
    )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", [*SMALL, WIDE_BF16], ids=lambda case: case.name)
def test_decode(case: Case, batch: str) -> None:
    assert SMALL[0].channels < gpu_decode.CHANNELS < WIDE_BF16.channels
    check_call(_jitted(case.activation), case, BATCHES[batch])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in SMALL], ids=lambda case: case.name
)
def test_model_shapes(case: Case) -> None:
    check_call(_jitted(case.activation), case, Rows(decode=(0, 9), pad_rows=1))


def test_refusals_have_reasons() -> None:
    for kind, decode_only, reason in (
        ("NVIDIA H200", True, None),
        ("NVIDIA H200", False, "prefill"),
        ("NVIDIA L4", True, "not for 'NVIDIA L4'"),
    ):
        with platform.target("gpu", kind):
            refused = triton_gpu.refuses(Facts.of(decode_only=decode_only))
        assert (refused is None) is (reason is None) and (reason or "") in (refused or "")
