"""The TPU kernels of gated_delta_rule, interpreted on CPU, against the float64 oracle."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import platform
from pallas_kernels.gated_delta_rule import mosaic_tpu
from pallas_kernels.gated_delta_rule.cases import CASES, Case
from pallas_kernels.registry import Facts
from tests.helpers.ragged import Rows, delta_rule_oracle
from tests.kernels.test_gated_delta_rule import draw, on_device

CASE = {case.name: case for case in CASES}
SMALL = [case for case in CASES if case.name.startswith("tiny")]
LARGE = [case for case in CASES if not case.name.startswith("tiny")]
GROUPED = Case("grouped", 2, 4, 128, 128)
GROUPED_BF16 = Case("grouped_bf16", 1, 3, 128, 128, dtype="bfloat16", atol=4e-3)
RACE = "RACE DETECTED"  # what the interpreter prints; it does not raise
TWO_CORES = ("tpu", "TPU v5")  # splits the heads into two blocks

DECODE = {
    "one": Rows(decode=(3,)),
    "fresh": Rows(decode=(0,)),
    "mixed_ages": Rows(decode=(5, 0, 0, 9, 1, 0), pad_rows=2),
    "first_rows_fresh": Rows(decode=(0, 0, 7), pad_rows=1),
    "padding": Rows(pad_rows=3),
    "three_blocks_of_rows": Rows(decode=tuple(n % 3 for n in range(35)), pad_rows=5),
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
    tokens: dict[str, np.ndarray] | None = None,
) -> None:
    """Out and every slot, the null slot included. `shared`: all rows read the same slot."""
    rng = np.random.default_rng(0)
    tokens = draw(case, rows.num_tokens, rng) if tokens is None else tokens
    used = sum(query for _, query in rows.all)
    for array in tokens.values():
        array[used:] = np.nan  # padding tokens
    slots = 2 * rows.num_rows + 2
    order = rng.permutation(np.arange(1, slots))
    read, write = (order[i : i + rows.num_rows].copy() for i in (0, rows.num_rows))
    write[::3] = read[::3]  # some rows update their slot in place
    if shared:
        read[:], write[:] = order[0], order[1 : rows.num_rows + 1]
    shape = (case.num_v_heads, case.k_dim, case.v_dim)
    before = np.full((slots, *shape), np.nan)
    for row, (earlier, _) in enumerate(rows.all):
        if earlier:
            before[read[row]] = rng.normal(size=shape).astype(np.float32)
    expected_out, after = np.zeros((rows.num_tokens, *shape[::2])), before.copy()
    for row, (earlier, _) in enumerate(rows.all):
        part = {name: x[rows.slices[row]] for name, x in tokens.items()}
        state = before[read[row]] if earlier else np.zeros(shape)
        expected_out[rows.slices[row]], after[write[row]] = delta_rule_oracle(
            **part, state=state, scale=case.k_dim**-0.5
        )
    read[len(rows.all) :] = write[len(rows.all) :] = 0
    out, state = _jitted(interpret, target)(
        **on_device(case, tokens),
        state=jnp.asarray(before, jnp.float32),
        ragged=rows.ragged(),
        read_slots=jnp.asarray(read, jnp.int32),
        write_slots=jnp.asarray(write, jnp.int32),
    )
    assert out.dtype == jnp.dtype(case.dtype)
    np.testing.assert_allclose(np.asarray(out, float), expected_out, rtol=0, atol=case.atol)
    state = np.asarray(state, float)
    np.testing.assert_allclose(state, after, rtol=0, atol=case.state_atol)
    untouched = [slot for slot in range(slots) if slot not in write[: len(rows.all)]]
    np.testing.assert_array_equal(state[untouched], before[untouched])


@pytest.mark.parametrize("batch", DECODE)
@pytest.mark.parametrize("case", [*SMALL, GROUPED, GROUPED_BF16], ids=lambda case: case.name)
def test_decode(case: Case, batch: str) -> None:
    check(case, DECODE[batch])


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_decode_of_model_shapes(case: Case) -> None:
    check(case, Rows(decode=(0, 9), pad_rows=1))


def test_decode_in_two_blocks_of_heads() -> None:
    assert mosaic_tpu.decode_heads(2, 4, 128, 128, mosaic_tpu.CHIPS["TPU v5"]) == 2
    check(GROUPED, DECODE["mixed_ages"], target=TWO_CORES)


def test_decode_rows_may_read_one_slot() -> None:
    check(GROUPED, Rows(decode=(5, 0, 5), pad_rows=1), shared=True)


def interpreter(mode: Literal["on_wait", "eager"]) -> pltpu.InterpretParams:
    """TPU memory and transfers, in one of two orders; neither alone sees every mistake."""
    return pltpu.InterpretParams(
        detect_races=True,
        dma_execution_mode=mode,
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
    )


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("batch", ["mixed_ages", "padding"])
@pytest.mark.timeout(300)
def test_decode_transfers(mode: Literal["on_wait", "eager"], batch: str, capfd) -> None:
    check(GROUPED, DECODE[batch], interpreter(mode), target=TWO_CORES)
    assert RACE not in capfd.readouterr().out


@pytest.mark.timeout(300)
def test_races_are_seen(capfd) -> None:
    """The interpreter reports what the call forbids: a row that reads what another one writes."""
    rows, case = Rows(decode=(1, 1)), SMALL[0]
    run = _jitted(interpreter("on_wait"), None)
    state = jnp.ones((4, case.num_v_heads, case.k_dim, case.v_dim))
    slots = {"read_slots": jnp.asarray([1, 2]), "write_slots": jnp.asarray([2, 3])}
    tokens = on_device(case, draw(case, 2, np.random.default_rng(0)))
    jax.block_until_ready(run(**tokens, state=state, ragged=rows.ragged(), **slots))
    assert RACE in capfd.readouterr().out


def facts(case: Case, kind: str = "TPU v6 lite", name: str = "tpu", **changes) -> Facts:
    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    keys = array(case.dtype, 8, case.num_k_heads, case.k_dim)
    values = {
        "q": keys,
        "k": keys,
        "v": array(case.dtype, 8, case.num_v_heads, case.v_dim),
        "state": array("float32", 9, case.num_v_heads, case.k_dim, case.v_dim),
        "decode_only": True,
    }
    with platform.target(name, kind):
        return Facts.of(**(values | changes))


def test_refusals_have_reasons() -> None:
    case = CASE["qwen35_9b"]
    for kind in mosaic_tpu.CHIPS:
        assert mosaic_tpu.refuses(facts(case, kind)) is None
    half = jax.ShapeDtypeStruct((8, 16, 128), jnp.dtype("float16"))
    one_group = Case("one_group", 1, 256, 128, 128)
    for refused, reason in (
        (facts(case, name="gpu"), "for TPU, not for gpu"),
        (facts(case, "TPU v3"), "knows no 'TPU v3'"),
        (facts(case, q=half), "not bfloat16, float16"),
        (facts(SMALL[0]), "multiples of 128, not 8 and 12"),
        (facts(one_group, "TPU v4"), "fits TPU v4's VMEM"),
    ):
        assert reason in str(mosaic_tpu.refuses(refused))
