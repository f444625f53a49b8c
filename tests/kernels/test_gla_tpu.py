"""The TPU kernels of gla, interpreted on CPU, against the float64 oracle."""

import functools
from dataclasses import replace
from typing import Literal

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import platform
from pallas_kernels.gla import mosaic_tpu
from pallas_kernels.gla.cases import CASES, MXU_STATE_ATOL, Case
from pallas_kernels.registry import ArrayFacts, Facts
from pallas_kernels.tpu_chip import CHIPS
from tests.helpers import slots
from tests.helpers.ragged import Rows
from tests.helpers.slots import DECODE_BATCHES, MIXED_BATCHES
from tests.kernels.test_gla import draw

CASE = {case.name: case for case in CASES}
PER_HEAD = replace(CASE["minimax_text_01"], name="per_head", num_k_heads=1, num_v_heads=2)
PER_CHANNEL = Case("per_channel", 2, 2, 128, 128, per_channel=True)
BREADTH = [
    PER_HEAD,
    PER_CHANNEL,
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            Case("grouped", 2, 4, 128, 256),
            Case("grouped_channels", 1, 2, 256, 128, per_channel=True),
            replace(PER_CHANNEL, name="bf16_channels", dtype="bfloat16", atol=PER_HEAD.atol),
        )
    ),
]
PREFILL = MIXED_BATCHES | {
    "whole_chunks": Rows(prefill=((0, 127), (3, 128), (9, 70))).padded(9, 330),
    "over_a_chunk": Rows(decode=(2,), prefill=((5, 129), (0, 2))).padded(9, 330),
}
RACE = "RACE DETECTED"  # what the interpreter prints; it does not raise
TWO_CORES = ("tpu", "TPU v5")  # splits the heads into two blocks


@functools.cache
def _jitted(
    interpret: bool | pltpu.InterpretParams = True, target: tuple[str, str] = ("tpu", "TPU v6e")
):
    def run(**arguments) -> tuple[jax.Array, jax.Array]:
        with platform.target(*target):
            return mosaic_tpu.gla(**arguments, scale=1.0, interpret=interpret)

    return jax.jit(run)


def check(case: Case, rows: Rows, call, *, shared: bool = False, seed: int = 0) -> None:
    tokens = draw(case, rows.num_tokens, seed)
    extra = MXU_STATE_ATOL if case.dtype == "bfloat16" and rows.prefill else 0.0
    tolerances = {"atol": case.atol + extra, "state_atol": case.state_atol + extra}
    slots.check(call, tokens, rows, shared=shared, seed=seed, **tolerances)


@pytest.mark.parametrize("batch", DECODE_BATCHES)
@pytest.mark.parametrize("case", BREADTH, ids=lambda case: case.name)
def test_decode(case: Case, batch: str) -> None:
    check(case, DECODE_BATCHES[batch], _jitted())


def test_decode_rows_may_read_one_slot() -> None:
    check(PER_HEAD, Rows(decode=(5, 0, 5)).padded(7, 7), _jitted(), shared=True)


@pytest.mark.parametrize("batch", PREFILL)
@pytest.mark.parametrize("case", BREADTH, ids=lambda case: case.name)
def test_prefill(case: Case, batch: str) -> None:
    check(case, PREFILL[batch], _jitted())


def test_decays_of_any_size() -> None:
    """Some tokens forget everything in a channel, their neighbours nothing."""
    rows = PREFILL["over_a_chunk"]
    tokens = draw(PER_CHANNEL, rows.num_tokens, 7)
    g = tokens.arrays["g"]
    g *= np.random.default_rng(8).choice([0.0, 1.0, 100.0], size=g.shape)
    assert g.min() < -500 < np.log(np.finfo(np.float32).tiny)
    slots.check(_jitted(), tokens, rows, atol=PER_CHANNEL.atol, state_atol=PER_CHANNEL.state_atol)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minimax_text_01", "gla_1b"])
def test_model_shapes(name: str) -> None:
    check(CASE[name], Rows(decode=(0, 9), prefill=((0, 5), (3, 70)), pad_rows=1), _jitted())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("case", [PER_HEAD, PER_CHANNEL], ids=lambda case: case.name)
@pytest.mark.timeout(300)
def test_transfers(mode: Literal["on_wait", "eager"], case: Case, capfd) -> None:
    """TPU memory: indices out of bounds raise, what was never written is NaN, slots are shared."""
    interpreter = pltpu.InterpretParams(
        detect_races=True,
        vector_clock_size=64,
        dma_execution_mode=mode,
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
    )
    rows = Rows(decode=(3, 0), prefill=((0, 1), (0, 5), (4, 1)), pad_rows=1, pad_tokens=3)
    check(case, rows, _jitted(interpreter, TWO_CORES))
    assert RACE not in capfd.readouterr().out


def facts(case: Case, kind: str = "TPU v6 lite", **changes) -> Facts:
    keys = ArrayFacts((8, case.num_k_heads, case.k_dim), case.dtype)
    values = {
        "q": keys,
        "k": keys,
        "v": ArrayFacts((8, case.num_v_heads, case.v_dim), case.dtype),
        "state": ArrayFacts((5, case.num_v_heads, case.k_dim, case.v_dim), "float32"),
        "decode_only": False,
    }
    with platform.target("tpu", kind):
        return Facts.of(**(values | changes))


def test_heads_are_split_between_cores() -> None:
    q, state = (facts(PER_CHANNEL).values[name] for name in ("q", "state"))
    assert mosaic_tpu.decode_heads(q, state, CHIPS["TPU v5"]) == 1
    assert mosaic_tpu.prefill_heads(q, state, CHIPS["TPU v5"]) == 1


def test_refusals_have_reasons() -> None:
    for name in ("minimax_text_01", "gla_1b"):
        for kind in CHIPS:
            assert mosaic_tpu.refuses(facts(CASE[name], kind)) is None
    large = facts(Case("large", 1, 1, 2048, 1024), "TPU v4", decode_only=True)
    for refused, reason in (
        (facts(PER_HEAD, "TPU v3"), "knows no 'TPU v3'"),
        (facts(PER_HEAD, k=ArrayFacts((8, 1, 128), "float16")), "not bfloat16, float16"),
        (facts(CASE["tiny"]), "multiples of 128, not 8 and 12"),
        (large, "TPU v4's VMEM is too small for one head's state of 2048 x 1024"),
    ):
        assert reason in str(mosaic_tpu.refuses(refused))
