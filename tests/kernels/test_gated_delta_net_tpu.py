"""The TPU kernels of gated_delta_net, interpreted on CPU, against the float64 oracle."""

import functools
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import platform
from pallas_kernels.causal_conv1d import state_shape
from pallas_kernels.gated_delta_net import States, mosaic_tpu
from pallas_kernels.gated_delta_net.cases import CASES, Case
from pallas_kernels.registry import Facts
from pallas_kernels.tpu_chip import CHIPS
from tests.helpers.ragged import Rows, delta_net_oracle
from tests.helpers.slots import rounded
from tests.helpers.tpu import RACE, device_memory
from tests.kernels.test_gated_delta_net import check_call, options, parameters
from tests.kernels.test_gated_delta_rule_tpu import DECODE

CASE = {case.name: case for case in CASES}
# The channels of q, k and v are 8 rows of tiles; every shape compiles anew, which takes seconds.
GROUPED = Case("grouped", 2, 4, 128, 128, bias=True, allow_neg_eigval=True)
# The kernel rounds nothing between the convolution and the output, which is below 4.
BF16 = replace(GROUPED, name="bf16", dtype="bfloat16", bias=False, atol=8e-3)
BREADTH = [
    BF16,
    pytest.param(GROUPED, marks=pytest.mark.slow),
    pytest.param(Case("ungrouped_width_2", 3, 3, 128, 128, width=2), marks=pytest.mark.slow),
    pytest.param(Case("one_key_head", 1, 3, 128, 128, width=3), marks=pytest.mark.slow),
]
# Tails of the convolution: rows with fewer earlier tokens than it keeps, and with as many.
AGES = DECODE | {"around_the_width": Rows(decode=(1, 2, 3, 4, 0), pad_rows=1)}
MIXED = {  # in one bucket: a bucket compiles once
    name: rows.padded(8, 400)
    for name, rows in {
        "mixed": Rows(decode=(3, 0, 7), prefill=((0, 2), (2, 64), (0, 130), (1, 1))),
        "chunk_and_neighbours": Rows(prefill=((3, 127), (0, 128), (2, 129))),
        "shorter_than_the_width": Rows(
            prefill=((0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (5, 3), (9, 4))
        ),
        "three_chunks": Rows(decode=(9,), prefill=((0, 391),)),
        "decode_in_a_mixed_bucket": Rows(decode=(3, 0)),
        "padding_mixed": Rows(),
    }.items()
}


@functools.cache
def _jitted(case: Case, interpret: bool | pltpu.InterpretParams) -> Any:
    static = {name: x for name, x in options(case).items() if name != "weights"}
    return jax.jit(functools.partial(mosaic_tpu.gated_delta_net, interpret=interpret, **static))


def check(
    case: Case, rows: Rows, interpret: bool | pltpu.InterpretParams = True, **kwargs: Any
) -> None:
    check_call(_jitted(case, interpret), case, rows, **kwargs)


@pytest.mark.parametrize("batch", AGES)
@pytest.mark.parametrize("case", BREADTH, ids=lambda case: case.name)
def test_decode(case: Case, batch: str) -> None:
    check(case, AGES[batch])


def test_decode_rows_may_read_one_slot() -> None:
    check(BF16, Rows(decode=(5, 0, 5), pad_rows=1), shared=True)


@pytest.mark.slow
@pytest.mark.parametrize("batch", MIXED)
@pytest.mark.parametrize("case", [GROUPED, replace(BF16, atol=2e-2, state_atol=5e-2)],
                         ids=lambda case: case.name)  # fmt: skip
def test_with_prefill_rows(case: Case, batch: str) -> None:
    check(case, MIXED[batch])


@pytest.mark.slow
@pytest.mark.parametrize("case", [GROUPED, Case("three", 3, 3, 128, 128)], ids=lambda x: x.name)
def test_blocks_of_heads(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key head each: two are written out, more are a loop."""
    monkeypatch.setattr(mosaic_tpu, "prefill_heads", lambda k, v, dtype: v // k)
    _jitted.cache_clear()  # what was traced before has other blocks
    try:
        check(case, MIXED["mixed"])
    finally:
        _jitted.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "bound"),
    # As in `gated_delta_rule`: every write is a reflection, and what is left of 200 writes to one
    # key after they cancel has 3 of the 8 bits of a bfloat16.
    [(replace(GROUPED, bias=False), 1e-4), (BF16, 0.3)],
    ids=lambda x: getattr(x, "name", None),
)
def test_nearly_equal_keys(case: Case, bound: float) -> None:
    rng = np.random.default_rng(3)
    keys, heads, rows = (
        2 * case.num_k_heads * case.k_dim,
        case.num_v_heads,
        Rows(prefill=((0, 200),)),
    )
    drawn = rng.normal(size=(200, case.channels))
    drawn[:, :keys] = drawn[:1, :keys] + 1e-2 * drawn[:, :keys]
    arrays = {
        "qkv": rounded(drawn, case.dtype),
        "a": np.full((200, heads), -40.0),  # nothing decays
        "b": np.full((200, heads), 40.0),  # and every write is whole
    }
    before = np.zeros((case.width - 1, case.channels)), np.zeros((heads, 128, 128))
    expected = delta_net_oracle(
        **arrays, conv=before[0], recurrent=before[1], **parameters(case),
        k_heads=case.num_k_heads, max_beta=1.0 + case.allow_neg_eigval,
    )  # fmt: skip
    pools = jnp.full(state_shape(2, *before[0].shape), jnp.nan, case.dtype)
    slot = jnp.asarray([1], jnp.int32)
    out, states = _jitted(case, True)(
        **{name: jnp.asarray(x, case.dtype) for name, x in arrays.items()},
        state=States(pools, jnp.full((2, heads, 128, 128), jnp.nan)),
        ragged=rows.ragged(), read_slots=slot, write_slots=slot, weights=options(case)["weights"],
    )  # fmt: skip
    for actual, wanted in ((out, expected[0]), (states.recurrent[1], expected[2])):
        error = np.linalg.norm(np.asarray(actual, float) - wanted) / np.linalg.norm(wanted)
        assert error < bound


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen35_9b", "qwen3_next_80b"])
def test_decode_of_model_shapes(name: str) -> None:
    check(CASE[name], Rows(decode=(0, 9), pad_rows=1))


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize(
    "batch",
    [
        *("mixed_ages", "padding"),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("mixed", "padding_mixed")),
    ],
)
@pytest.mark.timeout(300)
def test_transfers(mode: Literal["on_wait", "eager"], batch: str, capfd) -> None:
    check(GROUPED, (MIXED | DECODE)[batch], device_memory(mode))
    assert RACE not in capfd.readouterr().out


def facts(case: Case, kind: str = "TPU v6 lite", name: str = "tpu", **changes) -> Facts:
    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    heads = array(case.dtype, 8, case.num_v_heads)
    values = {
        "qkv": array(case.dtype, 8, case.channels),
        "a": array(case.dtype, *heads.shape, *[case.k_dim] * case.per_channel),
        "b": heads,
        "state": array("float32", 9, case.num_v_heads, case.k_dim, case.v_dim),
        "k_heads": case.num_k_heads,
        "decode_only": True,
    }
    with platform.target(name, kind):
        return Facts.of(**(values | changes))


def test_refusals_have_reasons() -> None:
    case = CASE["qwen35_9b"]
    for kind in CHIPS:
        assert mosaic_tpu.refuses(facts(case, kind)) is None
    half = jax.ShapeDtypeStruct((8, 32), jnp.dtype("float16"))
    states = jax.ShapeDtypeStruct((9, 32, 128, 128), jnp.dtype("bfloat16"))
    for refused, reason in (
        (facts(case, "TPU v3"), "knows no 'TPU v3'"),
        (facts(case, a=half), "not bfloat16, float16"),
        (facts(case, state=states), "float32, not in bfloat16"),
        (facts(CASE["kimi_linear_48b"]), "one decay per head"),
        (facts(CASE["olmo_hybrid_7b"]), "must be 128, not 96 and 192"),
        (
            facts(Case("wide", 16, 64, 128, 128), "TPU v4"),
            "TPU v4's VMEM is too small for a row's 64 states of 128 x 128",
        ),
        (facts(case, "TPU v4", decode_only=False), "too small for 128 tokens"),
        (facts(Case("uneven", 1, 12, 128, 128), decode_only=False), "12 value heads are too many"),
    ):
        assert reason in str(mosaic_tpu.refuses(refused))
