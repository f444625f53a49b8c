"""gated_delta_net against a float64 token-by-token oracle, on pools full of NaN."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_delta_net as op
from pallas_kernels import registry
from pallas_kernels.gated_delta_net.cases import CASES, Case
from tests.helpers import slots
from tests.helpers.ragged import Rows, delta_net_oracle
from tests.helpers.slots import BATCHES, Tokens, rounded

SMALL = [case for case in CASES if case.name.startswith("tiny")]
LARGE = [case for case in CASES if not case.name.startswith("tiny")]
IMPLEMENTATIONS = registry.implementations("gated_delta_net", "cpu")


def parameters(case: Case, seed: int = 0) -> dict[str, Any]:
    """Weights of a layer in float64, as their dtypes round them, with decays of all sizes."""
    rng = np.random.default_rng(1000 + seed)
    decays = (case.num_v_heads, case.k_dim)[: 1 + case.per_channel]
    return {
        "weight": rounded(0.5 * rng.normal(size=(case.channels, case.width)), case.dtype),
        "bias": rounded(rng.normal(size=case.channels), case.dtype) if case.bias else None,
        "A_log": rounded(np.log(rng.uniform(0.1, 16, size=case.num_v_heads)), "float32"),
        "dt_bias": rounded(rng.uniform(-7, 1, size=decays), "float32"),
    }


def options(case: Case, seed: int = 0) -> dict[str, Any]:
    """What a layer passes besides tokens, states and rows."""
    made = parameters(case, seed)
    bias = None if made["bias"] is None else jnp.asarray(made["bias"], case.dtype)
    A_log, dt_bias = (jnp.asarray(made[name], jnp.float32) for name in ("A_log", "dt_bias"))
    return {
        "weights": op.Weights(jnp.asarray(made["weight"], case.dtype), bias, A_log, dt_bias),
        "k_heads": case.num_k_heads,
        "allow_neg_eigval": case.allow_neg_eigval,
    }


def draw(case: Case, num_tokens: int, seed: int = 0) -> Tokens:
    """Random operands [num_tokens, ...] of a layer whose weights are `parameters(case, seed)`."""
    rng = np.random.default_rng(seed)
    heads = case.num_v_heads
    decays = (heads, case.k_dim)[: 1 + case.per_channel]
    shapes = {"qkv": (case.channels,), "a": decays, "b": (heads,)}
    return Tokens(
        {n: rounded(rng.normal(size=(num_tokens, *x)), case.dtype) for n, x in shapes.items()},
        dict.fromkeys(shapes, case.dtype),
        functools.partial(
            delta_net_oracle, **parameters(case, seed),
            k_heads=case.num_k_heads, max_beta=1.0 + case.allow_neg_eigval,
        ),
        (heads, case.k_dim, case.v_dim),
        (heads, case.v_dim),
        case.dtype,
    )  # fmt: skip


def check_call(
    call: Callable[..., Any], case: Case, rows: Rows, seed: int = 0, *, shared: bool = False
) -> None:
    """Out and every slot of both pools. `shared`: all rows read the same slot."""
    slots.check_convolved(
        functools.partial(call, weights=options(case, seed)["weights"]),
        draw(case, rows.num_tokens, seed), rows, (case.width - 1, case.channels), op.States,
        atol=case.atol, state_atol=case.state_atol, seed=seed, shared=shared,
    )  # fmt: skip


@functools.cache
def _jitted(case: Case, implementation: str | None):
    static = {name: x for name, x in options(case).items() if name != "weights"}
    return jax.jit(functools.partial(op.gated_delta_net, implementation=implementation, **static))


def check(case: Case, rows: Rows, implementation: str | None, seed: int = 0) -> None:
    check_call(_jitted(case, implementation), case, rows, seed)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_shapes(case: Case, batch: str, implementation: str) -> None:
    check(case, BATCHES[batch], implementation)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_model_shapes(case: Case, implementation: str) -> None:
    check(case, Rows(decode=(0, 9), prefill=((0, 5), (3, 70)), pad_rows=1), implementation)


def test_random_batches() -> None:
    rng = np.random.default_rng(17)
    for seed in range(6):
        decode = tuple(int(n) for n in rng.integers(0, 5, size=2))
        prefill = tuple((int(n), int(t)) for n, t in rng.integers((0, 1), (5, 90), size=(3, 2)))
        check(SMALL[0], Rows(decode, prefill).padded(9, 330), "reference", seed)


def test_separate_ops_choose_for_themselves() -> None:
    case, rows = SMALL[0], Rows(decode=(3, 0))
    with registry.recording() as choices:
        check_call(jax.jit(functools.partial(op.gated_delta_net, k_heads=2)), case, rows)
    chosen = [(choice.op, choice.implementation) for choice in choices]
    ops = ("gated_delta_net", "causal_conv1d", "gated_delta_rule")
    assert chosen == [(op, "reference") for op in ops]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": jnp.zeros((2, 84))}, r"qkv must be \(2, 80\)"),
        ({"qkv": jnp.zeros((2, 8, 10))}, r"qkv must be \[T, C\]"),
        ({"a": jnp.zeros((2, 3))}, "a must be"),
        ({"a": jnp.zeros((2, 4, 8))}, "weights.dt_bias must be"),
        ({"k_heads": 3}, "not a multiple of 3 key heads"),
        ({"k_heads": 0}, "there must be heads, got 4 value heads and 0 key heads"),
        ({"state": {"conv": jnp.zeros((5, 3, 80))}}, r"state.conv must be \(5, 3, 1, 80\)"),
        ({"state": {"recurrent": jnp.zeros((5, 4, 8, 12), jnp.float16)}}, "float32 or bfloat16"),
        ({"weights": {"A_log": jnp.zeros(4, jnp.bfloat16)}}, "weights.A_log must be float32"),
        ({"weights": {"conv_bias": jnp.zeros(8)}}, "weights.conv_bias must be"),
        ({"write_slots": jnp.zeros(3, jnp.int32)}, "write_slots must be"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    slot = jnp.zeros(2, jnp.int32)
    arguments: dict[str, Any] = {
        "qkv": jnp.zeros((2, 80)),
        "a": jnp.zeros((2, 4)),
        "b": jnp.zeros((2, 4)),
        "state": op.States(jnp.zeros((5, 3, 1, 80)), jnp.zeros((5, 4, 8, 12))),
        "ragged": Rows(decode=(1, 1)).ragged(),
        "read_slots": slot,
        "write_slots": slot,
        "weights": op.Weights(jnp.zeros((80, 4)), None, jnp.zeros(4), jnp.zeros(4)),
        "k_heads": 2,
    }
    for name, value in change.items():
        nested = isinstance(value, dict)
        arguments[name] = arguments[name]._replace(**value) if nested else value
    with pytest.raises(ValueError, match=message):
        op.gated_delta_net(**arguments)
