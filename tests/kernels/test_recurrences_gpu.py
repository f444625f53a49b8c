"""The Triton kernels of all recurrences, interpreted on CPU, against the float64 oracles."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import platform
from pallas_kernels.gated_delta_rule.cases import MXU_STATE_ATOL as GATED_DELTA_ATOL
from pallas_kernels.gated_delta_rule.gpu_prefill import inverse_of
from pallas_kernels.gla.cases import MXU_STATE_ATOL as GLA_ATOL
from pallas_kernels.registry import Facts
from pallas_kernels.ssd.cases import MXU_STATE_ATOL as SSD_ATOL
from tests.helpers import slots
from tests.helpers.ragged import Rows, delta_rule_oracle, selective_scan_oracle, ssd_oracle
from tests.helpers.slots import DECODE_BATCHES, MIXED_BATCHES, unit
from tests.kernels import (
    test_gated_delta_rule,
    test_gla,
    test_rwkv7,
    test_selective_scan,
    test_ssd,
)

OPS = {
    "gated_delta_rule": test_gated_delta_rule,
    "gla": test_gla,
    "rwkv7": test_rwkv7,
    "selective_scan": test_selective_scan,
    "ssd": test_ssd,
}
# Neither dimension is a power of two, and the columns take several programs.
BF16 = {"name": "uneven_bf16", "dtype": "bfloat16"}
UNEVEN = {
    "gated_delta_rule": {"num_k_heads": 2, "num_v_heads": 6, "k_dim": 24, "v_dim": 80,
                         "per_channel": True, "atol": 4e-3},
    "gla": {"num_k_heads": 2, "num_v_heads": 6, "k_dim": 24, "v_dim": 80, "atol": 8e-3},
    "rwkv7": {"heads": 3, "k_dim": 24, "v_dim": 80, "atol": 8e-3},
    "selective_scan": {"channels": 150, "state_size": 20, "atol": 3.2e-2},
    "ssd": {"heads": 4, "head_dim": 80, "groups": 2, "state_size": 20, "atol": 3.2e-2},
}  # fmt: skip
ALL = [(op, case) for op, module in OPS.items() for case in module.CASES]
SMALL = [(op, case) for op, case in ALL if case.name.startswith("tiny")]
LARGE = [(op, case) for op, case in ALL if not case.name.startswith("tiny")]
SMALLEST = dict(reversed(SMALL))
FAST = [*SMALL, *((op, replace(SMALLEST[op], **BF16, **shape)) for op, shape in UNEVEN.items())]


CHUNKS = "triton_gpu"
TOKENS = dict.fromkeys(OPS, CHUNKS) | dict.fromkeys(
    ("gated_delta_rule", "gla", "ssd"), "triton_gpu_recurrent"
)  # what goes token by token in prefill, too


def module_of(op: str, implementation: str = CHUNKS) -> Any:
    """The module with an op's Triton kernels."""
    return importlib.import_module(f"pallas_kernels.{op}.{implementation}")


def options(op: str, case: Any) -> dict[str, Any]:
    """What `draw`'s oracle of the op assumes."""
    return {
        "gated_delta_rule": {"scale": None, "l2norm": True},
        "gla": {"scale": 1.0},
        "ssd": {"dt_limit": getattr(case, "dt_limit", None)},
    }.get(op, {})


@functools.cache
def _jitted(op: str, implementation: str, **static: Any) -> Callable[..., Any]:
    run = getattr(module_of(op, implementation), op)
    return jax.jit(functools.partial(run, **static, interpret=True))


def call_of(op: str, case: Any, implementation: str = CHUNKS, **static: Any) -> Callable[..., Any]:
    """The kernel with the parameters of a layer, if the op has some."""
    on_device = getattr(OPS[op], "on_device", lambda case: {})
    run = _jitted(op, implementation, **(options(op, case) | static))
    return functools.partial(run, **on_device(case))


def check(
    op: str, case: Any, rows: Rows, implementation: str = CHUNKS, *, seed: int = 0,
    shared: bool = False,
) -> None:  # fmt: skip
    tokens = OPS[op].draw(case, rows.num_tokens, seed)
    slots.check(call_of(op, case, implementation), tokens, rows, atol=case.atol,
                state_atol=case.state_atol, seed=seed, shared=shared)  # fmt: skip


def names(value: Any) -> str | None:
    return getattr(value, "name", None)


@pytest.mark.parametrize("batch", DECODE_BATCHES)
@pytest.mark.parametrize(("op", "case"), FAST, ids=names)
def test_decode(op: str, case: Any, batch: str) -> None:
    check(op, case, DECODE_BATCHES[batch])


# What a product of bfloat16 operands adds to the tolerances of outputs and of states.
ROUNDING = {
    "gated_delta_rule": (0.0, GATED_DELTA_ATOL),
    "gla": (GLA_ATOL, GLA_ATOL),
    "ssd": (SSD_ATOL, SSD_ATOL),
}


def rounding(op: str, case: Any) -> Any:
    """A bfloat16 case with the tolerances of its prefill."""
    atol, state_atol = ROUNDING[op]
    return replace(case, atol=case.atol + atol, state_atol=state_atol)


def prefill_cases(op: str) -> list[Any]:
    """The small ones, and one with programs and channels to spare."""
    uneven = next(case for name, case in FAST if name == op and case.name == BF16["name"])
    return [*OPS[op].SMALL, rounding(op, uneven)]


PREFILLS = [(op, case) for op in ROUNDING for case in prefill_cases(op)]


@pytest.mark.parametrize("batch", MIXED_BATCHES)
@pytest.mark.parametrize(("op", "case"), PREFILLS, ids=names)
def test_prefill(op: str, case: Any, batch: str) -> None:
    check(op, case, MIXED_BATCHES[batch])


@pytest.mark.parametrize("batch", MIXED_BATCHES)
@pytest.mark.parametrize(("op", "case"), FAST, ids=names)
def test_token_by_token(op: str, case: Any, batch: str) -> None:
    check(op, case, MIXED_BATCHES[batch], TOKENS[op])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "case"), [pair for pair in LARGE if pair[1].dtype == "float32"], ids=names
)
def test_token_by_token_in_model_shapes(op: str, case: Any) -> None:
    rows = Rows(decode=(0, 9), prefill=((0, 5), (3, 20)), pad_rows=1)
    check(op, case, rows, TOKENS[op])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "case"),
    [pair for pair in LARGE if pair[0] in ROUNDING and pair[1].dtype == "bfloat16"],
    ids=names,
)
def test_prefill_of_model_shapes(op: str, case: Any) -> None:
    rows = Rows(decode=(0, 9), prefill=((0, 5), (3, 70)), pad_rows=1)
    check(op, rounding(op, case), rows)


@pytest.mark.parametrize("op", OPS)
def test_rows_may_read_one_slot(op: str) -> None:
    check(op, SMALLEST[op], Rows(decode=(5, 0, 5, 9)).padded(7, 7), shared=True)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "case"), LARGE, ids=names)
def test_model_shapes(op: str, case: Any) -> None:
    check(op, case, Rows(decode=(0, 9), pad_rows=1))


@pytest.mark.slow
@pytest.mark.parametrize(("op", "case"), SMALL, ids=names)
def test_random_batches(op: str, case: Any) -> None:
    rng = np.random.default_rng(7)
    for seed in range(5):
        decode = tuple(int(n) for n in rng.integers(0, 3, size=rng.integers(0, 8)))
        check(op, case, Rows(decode).padded(7, 7), seed=seed)


def test_keys_of_the_delta_rule_that_are_not_normalised() -> None:
    op, rows = "gated_delta_rule", DECODE_BATCHES["mixed_ages"]
    case = SMALLEST[op]
    tokens = OPS[op].draw(case, rows.num_tokens)
    arrays = dict(tokens.arrays) | {name: tokens.arrays[name] / 4 for name in "qk"}
    oracle = functools.partial(delta_rule_oracle, scale=case.k_dim**-0.5, l2norm=False)
    arrays = {name: slots.rounded(x, "float32") for name, x in arrays.items()}
    tokens = replace(tokens, arrays=arrays, oracle=oracle)
    call = call_of(op, case, l2norm=False)
    slots.check(call, tokens, rows, atol=case.atol, state_atol=case.state_atol)


@pytest.mark.parametrize("op", ["selective_scan", "ssd"])
def test_without_skip_and_bias(op: str) -> None:
    batches = DECODE_BATCHES | MIXED_BATCHES
    rows = batches["chunk_and_neighbours" if op in ROUNDING else "mixed_ages"]
    case = SMALLEST[op]
    tokens, parameters = OPS[op].draw(case, rows.num_tokens), OPS[op].parameters(case)
    zeros = {name: np.zeros_like(parameters[name]) for name in ("D", "dt_bias")}
    oracle = {
        "selective_scan": functools.partial(selective_scan_oracle, **parameters | zeros),
        "ssd": functools.partial(ssd_oracle, **parameters | zeros, **options(op, case)),
    }[op]
    call = functools.partial(call_of(op, case), D=None, dt_bias=None)
    slots.check(call, replace(tokens, oracle=oracle), rows,
                atol=case.atol, state_atol=case.state_atol)  # fmt: skip


def test_states_in_bfloat16_are_rounded_when_written() -> None:
    """What a float32 pool would hold, rounded once."""
    op, rows = "gated_delta_rule", Rows(decode=(3, 0), pad_rows=1)
    tokens, call = OPS[op].draw(SMALLEST[op], 3), call_of(op, SMALLEST[op])
    before = np.random.default_rng(1).normal(size=(4, *tokens.state_shape))
    index = jnp.asarray([2, 3, 0], jnp.int32)
    states = {}
    for dtype in ("bfloat16", "float32"):
        pool = jnp.asarray(before, jnp.bfloat16).astype(dtype)
        _, states[dtype] = call(
            **tokens.on_device(), state=pool, ragged=rows.ragged(), read_slots=index,
            write_slots=index,
        )  # fmt: skip
    assert states["bfloat16"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(states["bfloat16"], states["float32"].astype(jnp.bfloat16))


def facts(op: str, case: Any, kind: str = "NVIDIA A100-SXM4-80GB", **changes: Any) -> Facts:
    tokens = OPS[op].draw(case, 1)
    state = jax.ShapeDtypeStruct((9, *tokens.state_shape), jnp.float32)
    with platform.target("gpu", kind):
        given = tokens.on_device() | {"state": state, "decode_only": True}
        return Facts.of(**(given | changes))


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(
    ("implementation", "beta", "atol"),
    # Token by token float32 rounds states of up to 25 by up to 2e-6, 194 times.
    [(CHUNKS, 1.0, 8e-3), ("triton_gpu_recurrent", 2.0, 4e-4)],
)
def test_prefill_with_nearly_equal_keys(
    implementation: str, beta: float, atol: float, per_channel: bool
) -> None:
    op, rows = "gated_delta_rule", MIXED_BATCHES["long_prefill"]
    case = next(x for x in OPS[op].SMALL if x.per_channel == per_channel and x.name != "tiny")
    case = replace(case, max_beta=beta)
    tokens = test_gated_delta_rule.nearly_equal_keys(case, rows.num_tokens)
    call = call_of(op, case, implementation)
    slots.check(call, tokens, rows, atol=atol, state_atol=atol)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("beta", "bound"), [(1.0, 0.1), (2.0, 0.3)])
def test_chunks_in_bfloat16_with_nearly_equal_keys(
    beta: float, bound: float, per_channel: bool
) -> None:
    """In norms, as on TPU. Near beta = 2 an inverse is full of +-2 and its products cancel, by what
    bfloat16 rounds; a power series loses all.
    """
    case = test_gated_delta_rule.Case("correlated", 1, 2, 32, 32, beta, "bfloat16",
                                      per_channel=per_channel)  # fmt: skip
    rows, tokens = Rows(prefill=((0, 200),)), test_gated_delta_rule.nearly_equal_keys(case, 200)
    arrays = tokens.on_device()
    exact = {name: np.asarray(x, float) for name, x in arrays.items()}
    expected = tokens.oracle(**exact, state=np.zeros(tokens.state_shape))
    one = jnp.asarray([1], jnp.int32)
    out, state = call_of("gated_delta_rule", case)(
        **arrays, state=jnp.full((2, *tokens.state_shape), jnp.nan),
        ragged=rows.ragged(), read_slots=one, write_slots=one,
    )  # fmt: skip
    for actual, wanted in ((out, expected[0]), (state[1], expected[1])):
        error = np.linalg.norm(np.asarray(actual, float) - wanted) / np.linalg.norm(wanted)
        assert error < bound


@pytest.mark.parametrize(("beta", "atol"), [(1.0, 4e-5), (1.999, 2**-9)])
def test_inverses_of_the_delta_rule(beta: float, atol: float) -> None:
    """Of similar keys: off by less than bfloat16 rounds.

    Interpreters round parts as GPUs do. Values are up to `beta`; near 2 products cancel. The worst
    of nine draws was off by 1.8e-5 and 1.3e-3.
    """
    rng = np.random.default_rng(2)
    keys = unit(rng, 1, 32) + 0.1 * unit(rng, 64, 32)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    below = np.tril(beta * keys @ keys.T, -1)
    actual = inverse_of(jnp.asarray(below, jnp.float32))
    np.testing.assert_allclose(actual, np.linalg.inv(np.eye(64) + below), rtol=0, atol=atol)


@pytest.mark.parametrize("op", ["gla", "gated_delta_rule"])
def test_decays_per_channel_that_leave_nothing(op: str) -> None:
    """Of every other channel; between tokens of the rest there is next to no decay."""
    case = next(case for case in OPS[op].SMALL if case.per_channel)
    rows = MIXED_BATCHES["chunk_and_neighbours"]
    tokens = OPS[op].draw(case, rows.num_tokens)
    decays = tokens.arrays["g"] * np.where(np.arange(case.k_dim) % 2, 40.0, 1e-3)
    decays[::7, :, 0] = -90.0
    tokens = replace(tokens, arrays={**tokens.arrays, "g": slots.rounded(decays, "float32")})
    slots.check(call_of(op, case), tokens, rows, atol=case.atol, state_atol=case.state_atol)


@pytest.mark.parametrize(
    ("op", "name", "reason"),
    [
        ("gla", "minimax_text_01", None),
        ("gla", "gla_1b", None),
        ("gated_delta_rule", "qwen35_9b", None),
        ("gated_delta_rule", "kimi_linear_48b", None),
        ("gated_delta_rule", "qwen3_next_80b", "q, k, v in bfloat16, not q in float32"),
        ("ssd", "nemotron_3_nano", None),
        ("ssd", "bamba_9b", "x, B, C in bfloat16, not x in float32"),
        ("ssd", "falcon_h1_7b", None),
    ],
)
def test_what_prefill_takes(op: str, name: str, reason: str | None) -> None:
    case = {case.name: case for case in OPS[op].CASES}[name]
    refused = module_of(op).refuses(facts(op, case, decode_only=False))
    assert refused is None if reason is None else reason in str(refused)


def test_prefill_of_the_delta_rule_has_fewer_channels() -> None:
    op, cases = "gated_delta_rule", {case.name: case for case in test_gated_delta_rule.CASES}
    wide = replace(cases["qwen35_9b"], k_dim=256)
    refused = module_of(op).refuses(facts(op, wide, decode_only=False))
    assert "columns of 128 values, not of 256" in str(refused)


# The dimension that a program has all of.
ROWS_OF_STATES = {"gated_delta_rule": "k_dim", "gla": "k_dim", "rwkv7": "k_dim"}


@pytest.mark.parametrize("op", OPS)
def test_refusals_have_reasons(op: str) -> None:
    refuses, tiny = module_of(op).refuses, SMALLEST[op]
    for case in OPS[op].CASES:
        assert refuses(facts(op, case)) is None
    large = replace(tiny, **{ROWS_OF_STATES.get(op, "state_size"): 1024})
    for refused, reason in (
        (facts(op, tiny, "Tesla V100-SXM2-16GB"), "not for 'Tesla V100-SXM2-16GB'"),
        (facts(op, large), "1024 values are above 512"),
    ):
        assert reason in str(refuses(refused))
        assert reason in str(module_of(op, TOKENS[op]).refuses(refused))


@pytest.mark.parametrize("op", OPS)
def test_any_prefill_that_chunks_refuse_goes_token_by_token(op: str) -> None:
    for case in OPS[op].CASES:
        assert module_of(op, TOKENS[op]).refuses(facts(op, case, decode_only=False)) is None
