"""The Triton kernel of ssd, interpreted on CPU, against the float64 oracle."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

from pallas_kernels import platform
from pallas_kernels.registry import Facts
from pallas_kernels.ssd import triton_gpu
from pallas_kernels.ssd.cases import CASES, Case
from tests.helpers import slots
from tests.helpers.ragged import Rows, ssd_oracle
from tests.helpers.slots import DECODE_BATCHES
from tests.kernels.test_ssd import draw, on_device, parameters

SMALL = [case for case in CASES if case.name.startswith("tiny")]
LARGE = [case for case in CASES if not case.name.startswith("tiny")]
# Neither dimension is a power of two, and the channels of a head take two programs.
UNEVEN = Case("uneven_bf16", 4, 80, 2, 20, dtype="bfloat16", atol=3.2e-2)


@functools.cache
def _jitted(case: Case):
    call = functools.partial(triton_gpu.ssd, dt_limit=case.dt_limit, interpret=True)
    return functools.partial(jax.jit(call), **on_device(case))


def check(case: Case, rows: Rows, *, seed: int = 0, shared: bool = False) -> None:
    tokens = draw(case, rows.num_tokens, seed)
    slots.check(_jitted(case), tokens, rows, atol=case.atol, state_atol=case.state_atol,
                seed=seed, shared=shared)  # fmt: skip


@pytest.mark.parametrize("batch", DECODE_BATCHES)
@pytest.mark.parametrize("case", [*SMALL, UNEVEN], ids=lambda case: case.name)
def test_decode(case: Case, batch: str) -> None:
    check(case, DECODE_BATCHES[batch])


def test_rows_may_read_one_slot() -> None:
    check(SMALL[0], Rows(decode=(5, 0, 5, 9)).padded(7, 7), shared=True)


def test_without_skip_and_bias() -> None:
    case, rows = SMALL[0], DECODE_BATCHES["mixed_ages"]
    tokens = draw(case, rows.num_tokens)
    zeros = parameters(case) | dict.fromkeys(("D", "dt_bias"), np.zeros(case.heads))
    oracle = functools.partial(ssd_oracle, **zeros, dt_limit=case.dt_limit)
    call = functools.partial(_jitted(case), D=None, dt_bias=None)
    slots.check(call, replace(tokens, oracle=oracle), rows,
                atol=case.atol, state_atol=case.state_atol)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_model_shapes(case: Case) -> None:
    check(case, Rows(decode=(0, 9), pad_rows=1))


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_random_batches(case: Case) -> None:
    rng = np.random.default_rng(7)
    for seed in range(5):
        decode = tuple(int(n) for n in rng.integers(0, 3, size=rng.integers(0, 8)))
        check(case, Rows(decode).padded(7, 7), seed=seed)


def facts(case: Case, kind: str = "NVIDIA A100-SXM4-80GB", name: str = "gpu", **changes) -> Facts:
    state = jax.ShapeDtypeStruct((9, case.state_size, case.heads * case.head_dim), "float32")
    with platform.target(name, kind):
        return Facts.of(**({"state": state, "decode_only": True} | changes))


def test_refusals_have_reasons() -> None:
    for case in CASES:
        assert triton_gpu.refuses(facts(case)) is None
    for refused, reason in (
        (facts(SMALL[0], "NVIDIA A10"), "not for 'NVIDIA A10'"),
        (facts(SMALL[0], decode_only=False), "prefill"),
        (facts(Case("large", 1, 64, 1, 1024)), "1024 values are above 512"),
    ):
        assert reason in str(triton_gpu.refuses(refused))
