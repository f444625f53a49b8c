"""The TPU kernels of causal_conv1d, interpreted on CPU, against the float64 oracle."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import platform
from pallas_kernels.causal_conv1d import mosaic_tpu, state_shape
from pallas_kernels.causal_conv1d.cases import CASES, Case
from pallas_kernels.registry import Facts
from pallas_kernels.tpu_chip import CHIPS
from tests.helpers.ragged import Rows
from tests.helpers.tpu import RACE, device_memory
from tests.kernels.test_causal_conv1d import check_call

CASE = {case.name: case for case in CASES}
BF16 = Case("bf16", 256, 4, dtype="bfloat16", atol=3.2e-2)
F32 = Case("f32", 384, 3, bias=True, activation=None)
# Every shape compiles anew, which takes seconds.
BREADTH = [
    BF16,
    pytest.param(F32, marks=pytest.mark.slow),
    pytest.param(Case("width_2", 128, 2), marks=pytest.mark.slow),
    pytest.param(Case("width_9", 128, 9, atol=1e-5), marks=pytest.mark.slow),
    pytest.param(Case("two_blocks", 4096, 4), marks=pytest.mark.slow),
]
DECODE = {
    "all_ages": Rows(decode=(0, 1, 2, 3, 4, 90), pad_rows=2),
    "three_blocks_of_rows": Rows(decode=tuple(n % 6 for n in range(35)), pad_rows=5),
    "padding": Rows(pad_rows=3),
}
MIXED = {  # in one bucket: a bucket compiles once
    name: rows.padded(10, 400)
    for name, rows in {
        "shorter_than_the_width": Rows(
            prefill=((0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (5, 3), (0, 3), (9, 4))
        ),
        "chunk_and_neighbours": Rows(prefill=((3, 127), (0, 128), (2, 129))),
        "ends_of_chunks": Rows(prefill=((0, 126), (7, 4), (0, 125), (5, 1), (1, 130))),
        "mixed": Rows(decode=(2, 0, 9), prefill=((0, 3), (1, 4), (9, 1), (0, 300))),
        "decode_in_a_mixed_bucket": Rows(decode=(3, 0)),
        "padding": Rows(),
    }.items()
}


@functools.cache
def _jitted(activation: str | None, interpret: bool | pltpu.InterpretParams) -> Any:
    def run(x: jax.Array, weight: jax.Array, bias: Any, state: jax.Array, *rows: Any) -> Any:
        pool = state.reshape(state_shape(*state.shape))
        y, pool = mosaic_tpu.causal_conv1d(
            x, weight, bias, pool, *rows, activation=activation, interpret=interpret
        )
        return y, pool.reshape(state.shape)

    return jax.jit(run)


def check(case: Case, rows: Rows, interpret: bool | pltpu.InterpretParams = True) -> None:
    check_call(_jitted(case.activation, interpret), case, rows)


@pytest.mark.parametrize("batch", DECODE)
@pytest.mark.parametrize("case", BREADTH, ids=lambda case: case.name)
def test_decode(case: Case, batch: str) -> None:
    check(case, DECODE[batch])


@pytest.mark.parametrize("batch", MIXED)
@pytest.mark.parametrize("case", BREADTH, ids=lambda case: case.name)
def test_with_prefill_rows(case: Case, batch: str) -> None:
    check(case, MIXED[batch])


@pytest.mark.slow
def test_fewer_tokens_than_a_chunk() -> None:
    check(BF16, Rows(decode=(2,), prefill=((0, 2), (3, 20)), pad_rows=1, pad_tokens=5))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen35_9b", "lfm2_1b"])
def test_model_shapes(name: str) -> None:
    check(CASE[name], Rows(decode=(0, 9), prefill=((0, 2), (3, 20)), pad_rows=1))


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("batch", ["all_ages", "padding", "mixed", "mixed_padding"])
@pytest.mark.timeout(300)
def test_transfers(mode: Literal["on_wait", "eager"], batch: str, capfd) -> None:
    rows = {**DECODE, "mixed_padding": MIXED["padding"], "mixed": MIXED["mixed"]}[batch]
    check(BF16, rows, device_memory(mode))
    assert RACE not in capfd.readouterr().out


def facts(case: Case, kind: str = "TPU v6 lite", **changes: Any) -> Facts:
    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    values = {
        "x": array(case.dtype, 8, case.channels),
        "weight": array(case.dtype, case.channels, case.width),
        "state": array(case.dtype, *state_shape(9, case.width - 1, case.channels)),
    }
    with platform.target("tpu", kind):
        return Facts.of(**(values | changes))


def test_refusals_have_reasons() -> None:
    case = CASE["qwen35_9b"]
    for kind in CHIPS:
        assert mosaic_tpu.refuses(facts(case, kind)) is None
    half = jax.ShapeDtypeStruct((8192, 4), jnp.dtype("float16"))
    flat = jax.ShapeDtypeStruct((9, 3, 8192), jnp.dtype("bfloat16"))
    rounded = jax.ShapeDtypeStruct(state_shape(9, 3, 8192), jnp.dtype("float32"))
    for refused, reason in (
        (facts(case, "TPU v3"), "knows no 'TPU v3'"),
        (facts(case, weight=half), "not bfloat16, float16"),
        (facts(CASE["tiny"]), "C / 128, 128]"),
        (facts(case, state=flat), "not (9, 3, 8192)"),
        (facts(case, state=rounded), "in bfloat16, not in float32"),
        (facts(Case("wide", 128, 10)), "at most 9 taps, not 10"),
        (facts(CASE["olmo_hybrid_7b"], "TPU v4"), "VMEM is too small for 11520 channels"),
    ):
        assert reason in str(mosaic_tpu.refuses(refused))
