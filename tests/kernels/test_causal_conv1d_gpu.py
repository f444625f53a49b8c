"""The Triton kernels of causal_conv1d, interpreted on CPU, against the float64 oracle."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
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
MIXED_BATCHES = {
    name: rows.padded(7, 120)
    for name, rows in {
        "shorter_than_the_width": Rows(decode=(4,), prefill=((0, 1), (0, 2), (5, 1), (1, 2))),
        "tile_and_neighbours": Rows(decode=(3, 0), prefill=((0, 31), (2, 32), (0, 33), (9, 3))),
        "long_prefill": Rows(prefill=((4, 70), (0, 50))),
        "padding": Rows(),
    }.items()
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


@pytest.mark.parametrize("batch", MIXED_BATCHES)
@pytest.mark.parametrize("case", [*SMALL, WIDE_BF16], ids=lambda case: case.name)
def test_prefill(case: Case, batch: str) -> None:
    check_call(_jitted(case.activation), case, MIXED_BATCHES[batch])


def test_random_batches() -> None:
    rng = np.random.default_rng(17)
    for seed in range(8):
        decode = tuple(int(n) for n in rng.integers(0, 5, size=2))
        prefill = tuple((int(n), int(t)) for n, t in rng.integers((0, 1), (5, 30), size=(4, 2)))
        rows = Rows(decode, prefill).padded(7, 120)
        check_call(_jitted(SMALL[0].activation), SMALL[0], rows, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in SMALL], ids=lambda case: case.name
)
def test_model_shapes(case: Case) -> None:
    check_call(_jitted(case.activation), case, Rows(decode=(0, 9), pad_rows=1))
    rows = Rows(decode=(9,), prefill=((0, 2), (3, 40)), pad_tokens=2)
    check_call(_jitted(case.activation), case, rows)


def test_refusals_have_reasons() -> None:
    for kind, reason in (("NVIDIA H200", None), ("NVIDIA L4", "not for 'NVIDIA L4'")):
        with platform.target("gpu", kind):
            refused = triton_gpu.refuses(Facts.of())
        assert (refused is None) is (reason is None) and (reason or "") in (refused or "")
