"""The TPU kernel of rwkv7, interpreted on CPU, against the float64 oracle."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import platform
from pallas_kernels.registry import ArrayFacts, Facts
from pallas_kernels.rwkv7 import mosaic_tpu
from pallas_kernels.rwkv7.cases import CASES, Case
from pallas_kernels.tpu_chip import CHIPS
from tests.helpers import slots
from tests.helpers.ragged import Rows
from tests.helpers.slots import BATCHES, DECODE_BATCHES, MIXED_BATCHES
from tests.helpers.tpu import RACE, device_memory
from tests.kernels.test_rwkv7 import draw

CASE = {case.name: case for case in CASES}
# Heads share vectors of lanes, and of operands in bfloat16 two come in one word.
SHARING = Case("sharing_bf16", 4, 16, 64, dtype="bfloat16", atol=8e-3)
# The columns of a block's heads take more than one vector.
MANY = Case("many", 32, 8, 16)
WIDE = Case("wide", 2, 8, 256)
TWO_CORES = ("tpu", "TPU v5")  # splits the heads into two blocks


@functools.cache
def _jitted(interpret: object, target: tuple[str, str] | None = None):
    def run(**arguments) -> tuple[jax.Array, jax.Array]:
        with platform.target(*(target or ("cpu", "cpu"))):
            return mosaic_tpu.rwkv7(**arguments, interpret=interpret)

    return jax.jit(run)


def check(case: Case, rows: Rows, call=None, *, shared: bool = False) -> None:
    slots.check(call or _jitted(True), draw(case, rows.num_tokens), rows, shared=shared,
                atol=case.atol, state_atol=case.state_atol)  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES)
def test_batches(batch: str) -> None:
    check(SHARING, BATCHES[batch])


@pytest.mark.parametrize("case", [MANY, WIDE], ids=lambda case: case.name)
def test_shapes(case: Case) -> None:
    check(case, DECODE_BATCHES["mixed_ages"])


def test_in_two_blocks_of_heads() -> None:
    case, state = MANY, ArrayFacts((3, 8, 512), "float32")
    assert mosaic_tpu.decode_heads(ArrayFacts((8, 32, 16), "float32"), state, CHIPS["TPU v5"]) == 16
    check(case, DECODE_BATCHES["mixed_ages"], _jitted(True, TWO_CORES))


def test_rows_may_read_one_slot() -> None:
    check(SHARING, Rows(decode=(5, 0, 5, 9)).padded(7, 7), shared=True)


@pytest.mark.slow
def test_model_shape() -> None:
    check(CASE["rwkv7_2b9"], Rows(decode=(0, 9), prefill=((0, 5), (3, 70)), pad_rows=1))


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("batch", [DECODE_BATCHES["mixed_ages"], MIXED_BATCHES["padding"]])
@pytest.mark.timeout(300)
def test_transfers(mode: Literal["on_wait", "eager"], batch: Rows, capfd) -> None:
    check(SHARING, batch, _jitted(device_memory(mode), TWO_CORES))
    assert RACE not in capfd.readouterr().out


def facts(case: Case, kind: str = "TPU v6 lite") -> Facts:
    values = jax.ShapeDtypeStruct((8, case.heads, case.v_dim), jnp.dtype(case.dtype))
    state = jax.ShapeDtypeStruct((9, case.k_dim, case.heads * case.v_dim), jnp.float32)
    with platform.target("tpu", kind):
        return Facts.of(v=values, state=state, decode_only=True)


def test_refusals_have_reasons() -> None:
    for kind in CHIPS:
        assert mosaic_tpu.refuses(facts(CASE["rwkv7_2b9"], kind)) is None
    for refused, reason in (
        (facts(CASE["rwkv7_2b9"], "TPU v3"), "knows no 'TPU v3'"),
        (facts(CASE["tiny"]), "not 12, 3 heads, 8"),
        (facts(Case("odd", 3, 64, 64)), "not 64, 3 heads, 64"),
        (
            facts(Case("large", 1, 8192, 128), "TPU v4"),
            "TPU v4's VMEM is too small for one head's state of 8192 x 128",
        ),
    ):
        assert reason in str(mosaic_tpu.refuses(refused))
