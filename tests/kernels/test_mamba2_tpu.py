"""The TPU kernel of mamba2, interpreted on CPU, against the float64 oracle."""

import functools
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mamba2 as op
from pallas_kernels import platform, registry
from pallas_kernels.causal_conv1d import state_shape
from pallas_kernels.mamba2 import mosaic_tpu
from pallas_kernels.mamba2.cases import BF16_ATOL, CASES, Case
from pallas_kernels.registry import Facts
from pallas_kernels.tpu_chip import CHIPS
from tests.helpers.ragged import Rows
from tests.helpers.slots import DECODE_BATCHES
from tests.helpers.tpu import RACE, device_memory
from tests.kernels.test_mamba2 import check_call, draw, weights_of

CASE = {case.name: case for case in CASES}
# Every shape compiles anew, which takes seconds.
GROUPED = Case("grouped", 4, 64, 2, 128)
# The kernel rounds nothing between the convolution and the output.
EXACT_STATE = {"atol": BF16_ATOL, "state_atol": GROUPED.state_atol}
BF16 = replace(GROUPED, name="bf16", bias=False, dtype="bfloat16", **EXACT_STATE)
BREADTH = [
    BF16,
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            GROUPED,
            Case("two_vectors_of_heads", 8, 64, 2, 128),
            Case("wide", 2, 128, 1, 256, width=2, dt_limit=(0.1, 0.5)),
            Case("narrow", 8, 32, 1, 128, width=3),
        )
    ),
]
# Tails of the convolution: rows with fewer earlier tokens than it keeps, and with as many.
BATCHES = DECODE_BATCHES | {"around_the_width": Rows(decode=(1, 2, 3, 4, 0)).padded(7, 7)}


@functools.cache
def _jitted(case: Case, interpret: bool | pltpu.InterpretParams) -> Any:
    run = functools.partial(mosaic_tpu.mamba2, interpret=interpret, dt_limit=case.dt_limit)
    return jax.jit(run)


def check(
    case: Case, rows: Rows, interpret: bool | pltpu.InterpretParams = True, **kwargs: Any
) -> None:
    check_call(_jitted(case, interpret), case, rows, **kwargs)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", BREADTH, ids=lambda case: case.name)
def test_decode(case: Case, batch: str) -> None:
    check(case, BATCHES[batch])


def test_decode_rows_may_read_one_slot() -> None:
    check(BF16, Rows(decode=(5, 0, 5)).padded(7, 7), shared=True)


@pytest.mark.slow
def test_decode_of_many_rows() -> None:
    """Three blocks of channels, of which the last is not full."""
    check(GROUPED, Rows(decode=tuple(n % 3 for n in range(35)), pad_rows=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron_3_nano", "bamba_9b", "falcon_h1_7b"])
def test_model_shapes(name: str) -> None:
    case = CASE[name]
    tolerances = EXACT_STATE if case.dtype == "bfloat16" else {}
    check(replace(case, **tolerances), Rows(decode=(0, 9), pad_rows=1))


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("batch", ["mixed_ages", "padding"])
@pytest.mark.timeout(300)
def test_transfers(mode: Literal["on_wait", "eager"], batch: str, capfd) -> None:
    check(GROUPED, DECODE_BATCHES[batch], device_memory(mode))
    assert RACE not in capfd.readouterr().out


def facts(case: Case, kind: str = "TPU v6 lite", **changes) -> Facts:
    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    values = {
        "xBC": array(case.dtype, 8, case.channels),
        "dt": array(case.dtype, 8, case.heads),
        "state": array("float32", 9, case.state_size, case.heads * case.head_dim),
        "decode_only": True,
    }
    with platform.target("tpu", kind):
        return Facts.of(**(values | changes))


def test_refusals_have_reasons() -> None:
    case = CASE["nemotron_3_nano"]
    for kind, chip in CHIPS.items():
        reason = mosaic_tpu.refuses(facts(case, kind))
        assert reason is None if chip.cores == 1 else "one core" in str(reason)
    half = jax.ShapeDtypeStruct((8, 64), jnp.dtype("float16"))
    for refused, reason in (
        (facts(case, "TPU v3"), "knows no 'TPU v3'"),
        (facts(case, dt=half), "not bfloat16, float16"),
        (facts(case, decode_only=False), "leaves batches with prefill rows"),
        (facts(Case("odd", 3, 64, 1, 128)), "not 128, 64, 3 heads"),
        (
            facts(Case("large", 512, 64, 1, 1024), "TPU7x"),
            "TPU7x's VMEM is too small for a row's states of 1024 x 32768",
        ),
    ):
        assert reason in str(mosaic_tpu.refuses(refused))


@pytest.mark.parametrize(
    ("kind", "choices", "expected"),
    [
        (("tpu", "TPU v6 lite"), {}, {"mamba2": "mosaic_tpu"}),
        (("tpu", "TPU v5"), {}, {"causal_conv1d": "mosaic_tpu", "ssd": "mosaic_tpu"}),
        (("tpu", "TPU v6 lite"), {"ssd": "reference"},
         {"causal_conv1d": "mosaic_tpu", "ssd": "reference"}),
        (("gpu", "NVIDIA H100 80GB HBM3"), {},
         {"causal_conv1d": "triton_gpu", "ssd": "triton_gpu"}),
        (("cpu", "cpu"), {}, {"causal_conv1d": "reference", "ssd": "reference"}),
    ],
)  # fmt: skip
def test_what_runs(
    kind: tuple[str, str], choices: dict[str, str], expected: dict[str, str]
) -> None:
    """Where the kernel does not, those of the separate ops do, if there are any."""
    case, slot = CASE["nemotron_3_nano"], jnp.zeros(2, jnp.int32)
    inputs = jnp.zeros(state_shape(3, case.width - 1, case.channels), case.dtype)
    states = op.States(inputs, jnp.zeros((3, case.state_size, case.heads * case.head_dim)))
    run = functools.partial(op.mamba2, weights=weights_of(case))
    rows = {"ragged": Rows(decode=(3, 0)).ragged(), "read_slots": slot, "write_slots": slot}
    with platform.target(*kind), registry.forcing(choices), registry.recording() as made:
        jax.eval_shape(run, **draw(case, 2).on_device(), state=states, **rows)
    assert {x.op: x.implementation for x in made} == {"mamba2": "reference"} | expected
