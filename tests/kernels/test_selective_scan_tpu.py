"""The TPU kernel of selective_scan, interpreted on CPU, against the float64 oracle."""

import functools
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import platform
from pallas_kernels.registry import ArrayFacts, Facts
from pallas_kernels.selective_scan import mosaic_tpu
from pallas_kernels.selective_scan.cases import CASES, Case
from pallas_kernels.tpu_chip import CHIPS
from tests.helpers import slots
from tests.helpers.ragged import Rows, selective_scan_oracle
from tests.helpers.slots import BATCHES, DECODE_BATCHES, MIXED_BATCHES
from tests.helpers.tpu import RACE, device_memory
from tests.kernels.test_selective_scan import draw, on_device, parameters

CASE = {case.name: case for case in CASES}
SMALL = Case("small_bf16", 256, 16, dtype="bfloat16", atol=3.2e-2)
LONG = Case("long", 128, 24)
TWO_CORES = ("tpu", "TPU v5")  # splits the channels into two blocks


@functools.cache
def _jitted(interpret: object, target: tuple[str, str] | None = None):
    def run(**arguments) -> tuple[jax.Array, jax.Array]:
        with platform.target(*(target or ("cpu", "cpu"))):
            return mosaic_tpu.selective_scan(**arguments, interpret=interpret)

    return jax.jit(run)


def check(case: Case, rows: Rows, call=None, *, shared: bool = False) -> None:
    call = functools.partial(call or _jitted(True), **on_device(case))
    slots.check(call, draw(case, rows.num_tokens), rows, shared=shared,
                atol=case.atol, state_atol=case.state_atol)  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES)
def test_batches(batch: str) -> None:
    check(SMALL, BATCHES[batch])


def test_float32_and_another_size() -> None:
    check(LONG, DECODE_BATCHES["mixed_ages"])


def test_without_skip_and_bias() -> None:
    rows = DECODE_BATCHES["mixed_ages"]
    zeros = parameters(LONG) | dict.fromkeys(("D", "dt_bias"), np.zeros(LONG.channels))
    tokens = replace(
        draw(LONG, rows.num_tokens), oracle=functools.partial(selective_scan_oracle, **zeros)
    )
    call = functools.partial(_jitted(True), A=on_device(LONG)["A"], D=None, dt_bias=None)
    slots.check(call, tokens, rows, atol=LONG.atol, state_atol=LONG.state_atol)


def test_rows_may_read_one_slot() -> None:
    check(SMALL, Rows(decode=(5, 0, 5, 9)).padded(7, 7), shared=True)


@pytest.mark.slow
def test_model_shape() -> None:
    check(CASE["falcon_mamba_7b"], Rows(decode=(0, 9), prefill=((0, 5), (3, 70)), pad_rows=1))


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("batch", [DECODE_BATCHES["mixed_ages"], MIXED_BATCHES["padding"]])
@pytest.mark.timeout(300)
def test_transfers(mode: Literal["on_wait", "eager"], batch: Rows, capfd) -> None:
    assert mosaic_tpu.decode_lanes(ArrayFacts((9, 16, 256), "float32"), CHIPS["TPU v5"]) == 128
    check(SMALL, batch, _jitted(device_memory(mode), TWO_CORES))
    assert RACE not in capfd.readouterr().out


def facts(case: Case, kind: str = "TPU v6 lite") -> Facts:
    state = jax.ShapeDtypeStruct((9, case.state_size, case.channels), jnp.float32)
    with platform.target("tpu", kind):
        return Facts.of(state=state, decode_only=True)


def test_refusals_have_reasons() -> None:
    for kind in CHIPS:
        assert mosaic_tpu.refuses(facts(CASE["falcon_mamba_7b"], kind)) is None
    for refused, reason in (
        (facts(CASE["falcon_mamba_7b"], "TPU v3"), "knows no 'TPU v3'"),
        (facts(CASE["tiny"]), "not 4 and 12"),
        (
            facts(Case("large", 128, 16384), "TPU v4"),
            "TPU v4's VMEM is too small for a state of 16384 x 128 channels",
        ),
    ):
        assert reason in str(mosaic_tpu.refuses(refused))
