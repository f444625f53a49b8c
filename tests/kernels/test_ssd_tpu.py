"""The TPU kernels of ssd, interpreted on CPU, against the float64 oracle."""

import functools
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import platform
from pallas_kernels.registry import Facts
from pallas_kernels.ssd import mosaic_tpu
from pallas_kernels.ssd.cases import CASES, MXU_STATE_ATOL, Case
from pallas_kernels.tpu_chip import CHIPS
from tests.helpers import slots
from tests.helpers.ragged import Rows
from tests.helpers.slots import DECODE_BATCHES, MIXED_BATCHES
from tests.helpers.tpu import RACE, device_memory
from tests.kernels.test_ssd import draw, on_device

CASE = {case.name: case for case in CASES}
GROUPED = Case("grouped", 4, 64, 2, 128)
GROUPED_BF16 = replace(CASE["nemotron_3_nano"], name="grouped_bf16", heads=4, groups=2)
WIDE = Case("wide", 2, 128, 1, 256, dt_limit=(0.1, 0.5))
BREADTH = [GROUPED_BF16, *(pytest.param(x, marks=pytest.mark.slow) for x in (GROUPED, WIDE))]
TWO_CORES = ("tpu", "TPU v5")  # splits the heads into two blocks


@functools.cache
def _jitted(
    case: Case, interpret: bool | pltpu.InterpretParams, target: tuple[str, str] | None = None
):
    layer = on_device(case)

    def run(**arguments) -> tuple[jax.Array, jax.Array]:
        call = functools.partial(mosaic_tpu.ssd, dt_limit=case.dt_limit, **layer)
        if target is None:
            return call(**arguments, interpret=interpret)
        with platform.target(*target):
            return call(**arguments, interpret=interpret)

    return jax.jit(run)


def check(case: Case, rows: Rows, call, *, shared: bool = False) -> None:
    rounds = case.dtype == "bfloat16" and rows.prefill
    tolerances = {"atol": case.atol, "state_atol": MXU_STATE_ATOL if rounds else case.state_atol}
    if rounds:
        tolerances["atol"] += MXU_STATE_ATOL
    slots.check(call, draw(case, rows.num_tokens), rows, shared=shared, **tolerances)


@pytest.mark.parametrize("batch", DECODE_BATCHES)
@pytest.mark.parametrize("case", BREADTH, ids=lambda case: case.name)
def test_decode(case: Case, batch: str) -> None:
    check(case, DECODE_BATCHES[batch], _jitted(case, True))


def test_decode_of_many_rows() -> None:
    check(GROUPED, Rows(decode=tuple(n % 3 for n in range(35)), pad_rows=5), _jitted(GROUPED, True))


def test_decode_rows_may_read_one_slot() -> None:
    check(GROUPED, Rows(decode=(5, 0, 5), pad_rows=1), _jitted(GROUPED, True), shared=True)


@pytest.mark.parametrize("batch", MIXED_BATCHES)
@pytest.mark.parametrize("case", BREADTH, ids=lambda case: case.name)
def test_prefill(case: Case, batch: str) -> None:
    check(case, MIXED_BATCHES[batch], _jitted(case, True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron_3_nano", "bamba_9b", "falcon_h1_7b"])
def test_model_shapes(name: str) -> None:
    rows = Rows(decode=(0, 9), prefill=((0, 5), (3, 70)), pad_rows=1)
    check(CASE[name], rows, _jitted(CASE[name], True))


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("batch", [DECODE_BATCHES["mixed_ages"], MIXED_BATCHES["padding"],
                                   MIXED_BATCHES["one_token_prompts"]])  # fmt: skip
@pytest.mark.timeout(300)
def test_transfers(mode: Literal["on_wait", "eager"], batch: Rows, capfd) -> None:
    blocks = mosaic_tpu.decode_heads(jnp.zeros((1, 4, 64)), jnp.zeros((1, 2, 128)), CHIPS["TPU v5"])
    assert blocks == 2
    check(GROUPED, batch, _jitted(GROUPED, device_memory(mode), TWO_CORES))
    assert RACE not in capfd.readouterr().out


def facts(case: Case, kind: str = "TPU v6 lite", **changes) -> Facts:
    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    weights = array(case.dtype, 8, case.groups, case.state_size)
    values = {
        "x": array(case.dtype, 8, case.heads, case.head_dim),
        "B": weights,
        "C": weights,
        "decode_only": True,
    }
    with platform.target("tpu", kind):
        return Facts.of(**(values | changes))


def test_refusals_have_reasons() -> None:
    case = CASE["nemotron_3_nano"]
    for kind in CHIPS:
        assert mosaic_tpu.refuses(facts(case, kind)) is None
    half = jax.ShapeDtypeStruct((8, 8, 128), jnp.dtype("float16"))
    for refused, reason in (
        (facts(case, "TPU v3"), "knows no 'TPU v3'"),
        (facts(case, B=half), "not bfloat16, float16"),
        (facts(CASE["tiny"]), "not 12, 8, 2 heads"),
        (facts(Case("odd", 3, 64, 1, 128)), "not 128, 64, 3 heads"),
        (
            facts(Case("large", 1, 128, 1, 8192), "TPU v4"),
            "TPU v4's VMEM is too small for one head's state of 8192 x 128",
        ),
    ):
        assert reason in str(mosaic_tpu.refuses(refused))
