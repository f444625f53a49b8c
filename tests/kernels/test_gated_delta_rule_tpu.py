"""The TPU kernels of gated_delta_rule, interpreted on CPU, against the float64 oracle."""

import functools
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import platform
from pallas_kernels.gated_delta_rule import mosaic_tpu
from pallas_kernels.gated_delta_rule.cases import CASES, MXU_STATE_ATOL, Case
from pallas_kernels.registry import ArrayFacts, Facts
from pallas_kernels.tpu_chip import CHIPS
from tests.helpers import slots
from tests.helpers.ragged import Rows
from tests.helpers.tpu import RACE, device_memory
from tests.kernels.test_gated_delta_rule import draw, nearly_equal_keys

CASE = {case.name: case for case in CASES}
SMALL = [case for case in CASES if case.name.startswith("tiny")]
LARGE = [case for case in CASES if not case.name.startswith("tiny")]
GROUPED = Case("grouped", 2, 4, 128, 128)
Q, STATE = ArrayFacts((1, 2, 128), "float32"), ArrayFacts((1, 4, 128, 128), "float32")
GROUPED_BF16 = Case("grouped_bf16", 1, 3, 128, 128, dtype="bfloat16", atol=4e-3)
CHANNELS = Case("channels", 1, 2, 128, 128, per_channel=True)
CHANNELS_BF16 = replace(CHANNELS, name="channels_bf16", dtype="bfloat16", atol=4e-3)
# Every shape compiles anew, which takes seconds.
SLOW = (GROUPED, CHANNELS, CHANNELS_BF16, *SMALL)
BREADTH = [GROUPED_BF16, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)]
TWO_CORES = ("tpu", "TPU v5")  # splits the heads into two blocks

DECODE = {
    "one": Rows(decode=(3,)),
    "fresh": Rows(decode=(0,)),
    "mixed_ages": Rows(decode=(5, 0, 0, 9, 1, 0), pad_rows=2),
    "first_rows_fresh": Rows(decode=(0, 0, 7), pad_rows=1),
    "padding": Rows(pad_rows=3),
    "three_blocks_of_rows": Rows(decode=tuple(n % 3 for n in range(35)), pad_rows=5),
}
# In one bucket below a chunk and one of several chunks, since every bucket compiles anew.
PREFILL = {
    "one_token_prompts": Rows(prefill=((0, 1), (0, 1), (4, 1))).padded(6, 40),
    "fresh_between": Rows(decode=(0,), prefill=((5, 9), (0, 9), (5, 9), (0, 9))).padded(6, 40),
    "padding_mixed": Rows().padded(6, 40),
    "chunk_and_neighbours": Rows(prefill=((0, 127), (3, 128), (0, 129))).padded(9, 390),
    "three_chunks": Rows(prefill=((64, 300), (0, 2))).padded(9, 390),
    "mixed": Rows(decode=(3, 0, 7), prefill=((0, 63), (2, 64), (0, 65), (9, 1))).padded(9, 390),
    "decode_in_a_mixed_bucket": Rows(decode=(3, 0)).padded(9, 390),
}


@functools.cache
def _jitted(interpret: bool | pltpu.InterpretParams, target: tuple[str, str] | None):
    def run(**arguments) -> tuple[jax.Array, jax.Array]:
        call = functools.partial(mosaic_tpu.gated_delta_rule, scale=None, l2norm=True)
        if target is None:
            return call(**arguments, interpret=interpret)
        with platform.target(*target):
            return call(**arguments, interpret=interpret)

    return jax.jit(run)


def check(
    case: Case,
    rows: Rows,
    interpret: bool | pltpu.InterpretParams = True,
    *,
    target: tuple[str, str] | None = None,
    shared: bool = False,
    tokens: slots.Tokens | None = None,
) -> None:
    rounds = case.dtype == "bfloat16" and rows.prefill
    state_atol = MXU_STATE_ATOL if rounds else case.state_atol
    tokens, call = tokens or draw(case, rows.num_tokens), _jitted(interpret, target)
    slots.check(call, tokens, rows, atol=case.atol, state_atol=state_atol, shared=shared)


@pytest.mark.parametrize("batch", DECODE)
@pytest.mark.parametrize("case", BREADTH, ids=lambda case: case.name)
def test_decode(case: Case, batch: str) -> None:
    check(case, DECODE[batch])


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_decode_of_model_shapes(case: Case) -> None:
    check(case, Rows(decode=(0, 9), pad_rows=1))


def test_decode_in_two_blocks_of_heads() -> None:
    assert mosaic_tpu.decode_heads(Q, STATE, CHIPS["TPU v5"]) == 2
    check(GROUPED, DECODE["mixed_ages"], target=TWO_CORES)


def test_a_key_head_may_serve_several_blocks() -> None:
    case = Case("one_key_head", 1, 4, 128, 128)
    assert mosaic_tpu.decode_heads(ArrayFacts((1, 1, 128), "float32"), STATE, CHIPS["TPU v5"]) == 2
    check(case, Rows(decode=(5, 0), prefill=((3, 5),)), target=TWO_CORES)


def test_decode_rows_may_read_one_slot() -> None:
    check(GROUPED, Rows(decode=(5, 0, 5), pad_rows=1), shared=True)


def test_decays_per_channel() -> None:
    check(CHANNELS_BF16, Rows(decode=(5, 0), prefill=((3, 129), (0, 2)), pad_rows=1, pad_tokens=9))


@pytest.mark.slow
@pytest.mark.parametrize("case", [CHANNELS, CHANNELS_BF16], ids=lambda case: case.name)
def test_any_decay_per_channel(case: Case) -> None:
    """From one token to the next nothing, or everything, is left: e^1500 is no float32."""
    rows = Rows(prefill=((0, 127), (3, 130)))
    tokens = draw(case, rows.num_tokens, 5)
    drawn = np.random.default_rng(6).uniform(size=tokens.arrays["g"].shape)
    g = np.where(drawn < 0.3, -100.0, np.where(drawn < 0.6, 0.0, tokens.arrays["g"]))
    check(case, rows, tokens=replace(tokens, arrays={**tokens.arrays, "g": g}))


@pytest.mark.slow
@pytest.mark.parametrize("batch", PREFILL)
@pytest.mark.parametrize("case", BREADTH, ids=lambda case: case.name)
def test_prefill(case: Case, batch: str) -> None:
    check(case, PREFILL[batch])


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_prefill_of_model_shapes(case: Case) -> None:
    check(case, Rows(decode=(0, 9), prefill=((0, 5), (3, 70)), pad_rows=1))


@pytest.mark.slow
def test_prefill_in_two_blocks_of_heads() -> None:
    assert mosaic_tpu.prefill_heads(Q, STATE, 4, CHIPS["TPU v5"]) == 2
    check(GROUPED, PREFILL["mixed"], target=TWO_CORES)


@pytest.mark.slow
def test_prefill_rows_may_read_one_slot() -> None:
    check(GROUPED, PREFILL["fresh_between"], shared=True)


@pytest.mark.slow
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(
    ("dtype", "max_beta", "bound"),
    [
        ("float32", 2.0, 1e-4),
        # Nothing decays and 200 writes go to one key: the state is the sum of what is left after
        # they cancel, so that operands of 8 bits leave 5, and 3 where every write is a reflection.
        # With exact inverses it is the same; a series in powers of A is off by many orders.
        ("bfloat16", 1.0, 0.1),
        ("bfloat16", 2.0, 0.3),
    ],
)
def test_nearly_equal_keys(dtype: str, max_beta: float, bound: float, per_channel: bool) -> None:
    case = Case("correlated", 1, 2, 128, 128, max_beta, dtype, per_channel=per_channel)
    rows, tokens = Rows(prefill=((0, 200),)), nearly_equal_keys(case, 200)
    arrays = tokens.on_device()
    exact = {name: np.asarray(x, float) for name, x in arrays.items()}
    expected = tokens.oracle(**exact, state=np.zeros((2, 128, 128)))
    out, state = _jitted(True, None)(
        **arrays,
        state=jnp.full((2, 2, 128, 128), jnp.nan),
        ragged=rows.ragged(),
        read_slots=jnp.asarray([1], jnp.int32),
        write_slots=jnp.asarray([1], jnp.int32),
    )
    for actual, wanted in ((out, expected[0]), (state[1], expected[1])):
        error = np.linalg.norm(np.asarray(actual, float) - wanted) / np.linalg.norm(wanted)
        assert error < bound


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("batch", ["mixed_ages", "padding", "fresh_between", "padding_mixed"])
@pytest.mark.parametrize(
    "case", [GROUPED, pytest.param(CHANNELS, marks=pytest.mark.slow)], ids=lambda case: case.name
)
@pytest.mark.timeout(300)
def test_transfers(mode: Literal["on_wait", "eager"], batch: str, case: Case, capfd) -> None:
    check(case, (DECODE | PREFILL)[batch], device_memory(mode), target=TWO_CORES)
    assert RACE not in capfd.readouterr().out


def facts(case: Case, kind: str = "TPU v6 lite", **changes) -> Facts:
    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    keys = array(case.dtype, 8, case.num_k_heads, case.k_dim)
    values = {
        "q": keys,
        "k": keys,
        "v": array(case.dtype, 8, case.num_v_heads, case.v_dim),
        "g": array("float32", 8, case.num_v_heads, *[case.k_dim] * case.per_channel),
        "state": array("float32", 9, case.num_v_heads, case.k_dim, case.v_dim),
        "decode_only": True,
    }
    with platform.target("tpu", kind):
        return Facts.of(**(values | changes))


def test_refusals_have_reasons() -> None:
    case = CASE["qwen35_9b"]
    for kind in CHIPS:
        for taken in (case, CASE["kimi_linear_48b"]):
            assert mosaic_tpu.refuses(facts(taken, kind, decode_only=False)) is None
    half = jax.ShapeDtypeStruct((8, 16, 128), jnp.dtype("float16"))
    large = Case("large", 1, 1, 1024, 1024)
    for refused, reason in (
        (facts(case, "TPU v3"), "knows no 'TPU v3'"),
        (facts(case, q=half), "not bfloat16, float16"),
        (facts(SMALL[0]), "multiples of 128, not 8 and 12"),
        (facts(large, "TPU v4"), "TPU v4's VMEM is too small for one head's state of 1024 x 1024"),
    ):
        assert reason in str(mosaic_tpu.refuses(refused))
