"""mamba2 against a float64 token-by-token oracle, on pools full of NaN."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mamba2 as op
from pallas_kernels.mamba2.cases import CASES, Case
from pallas_kernels.registry import REFERENCE
from tests.helpers import slots
from tests.helpers.ragged import Rows, mamba2_oracle
from tests.helpers.slots import BATCHES, DECODE_BATCHES, Tokens, rounded

SMALL = [case for case in CASES if case.name.startswith("tiny")]


def parameters(case: Case, seed: int = 0) -> dict[str, Any]:
    """Weights of a layer in float64, as their dtypes round them; dt spreads over all sizes."""
    rng = np.random.default_rng(1000 + seed)
    weight = case.width**-0.5 * rng.normal(size=(case.channels, case.width))
    bias = 0.3 * rng.normal(size=case.channels)
    for x in (weight, bias):  # B and C of length 1, since silu halves what is small
        x[case.heads * case.head_dim :] *= 2 * case.state_size**-0.5
    return {
        "weight": rounded(weight, case.dtype),
        "bias": rounded(bias, case.dtype) if case.bias else None,
        "A_log": rounded(np.log(rng.uniform(1, 16, size=case.heads)), "float32"),
        "D": rounded(rng.normal(size=case.heads), "float32"),
        "dt_bias": rounded(rng.uniform(-6, 1, size=case.heads), "float32"),
    }


def weights_of(case: Case, seed: int = 0) -> op.Weights:
    """`parameters` as the op takes them."""
    made = parameters(case, seed)
    conv, bias = (
        None if made[name] is None else jnp.asarray(made[name], case.dtype)
        for name in ("weight", "bias")
    )
    assert conv is not None
    heads = (jnp.asarray(made[name], jnp.float32) for name in ("A_log", "D", "dt_bias"))
    return op.Weights(conv, bias, *heads)


def draw(case: Case, num_tokens: int, seed: int = 0) -> Tokens:
    """Random operands [num_tokens, ...] of a layer whose weights are `parameters(case, seed)`."""
    rng = np.random.default_rng(seed)
    shapes = {"xBC": (num_tokens, case.channels), "dt": (num_tokens, case.heads)}
    inner = case.heads * case.head_dim
    return Tokens(
        {name: rounded(rng.normal(size=x), case.dtype) for name, x in shapes.items()},
        dict.fromkeys(shapes, case.dtype),
        functools.partial(mamba2_oracle, **parameters(case, seed), dt_limit=case.dt_limit),
        (case.state_size, inner),
        (inner,),
        case.dtype,
    )


def check_call(
    call: Callable[..., Any], case: Case, rows: Rows, seed: int = 0, *, shared: bool = False
) -> None:
    """Out and every slot of both pools. `shared`: all rows read the same slot."""
    slots.check_convolved(
        functools.partial(call, weights=weights_of(case, seed)),
        draw(case, rows.num_tokens, seed), rows, (case.width - 1, case.channels), op.States,
        atol=case.atol, state_atol=case.state_atol, seed=seed, shared=shared,
    )  # fmt: skip


@functools.cache
def _jitted(case: Case, implementation: str | None) -> Callable[..., Any]:
    return jax.jit(
        functools.partial(op.mamba2, implementation=implementation, dt_limit=case.dt_limit)
    )


def check(case: Case, rows: Rows, implementation: str | None, seed: int = 0) -> None:
    check_call(_jitted(case, implementation), case, rows, seed)


@pytest.mark.parametrize("batch", BATCHES)
def test_small_shapes(batch: str) -> None:
    check(SMALL[0], BATCHES[batch], REFERENCE)


@pytest.mark.parametrize("batch", DECODE_BATCHES)
def test_clamped_step_sizes(batch: str) -> None:
    check(SMALL[1], DECODE_BATCHES[batch], REFERENCE)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)
def test_all_shapes(case: Case) -> None:
    check(case, Rows(decode=(0, 9), prefill=((0, 5), (3, 70)), pad_rows=1), REFERENCE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"xBC": jnp.zeros((2, 84))}, "must be H P \\+ 2 G N, each 1 or more, got 84"),
        ({"dt": jnp.zeros((2, 0))}, "each 1 or more, got 64 of them with 0 heads"),
        ({"state": {"recurrent": jnp.zeros((5, 0, 32))}}, r"each 1 or more.*\(5, 0, 32\)"),
        ({"dt_limit": None}, "dt_limit must be two numbers, .*, got None"),
        ({"dt_limit": (0.0,)}, r"dt_limit must be two numbers, .*, got \(0.0,\)"),
        ({"dt_limit": ("a", 1)}, r"dt_limit must be two numbers, .*, got \('a', 1\)"),
        ({"xBC": jnp.zeros((2, 8, 10))}, r"xBC must be \[T, C\]"),
        ({"dt": jnp.zeros((2, 5))}, "with 5 heads"),
        ({"dt": jnp.zeros((2, 8))}, r"weights.A_log must be \(8,\)"),
        ({"xBC": jnp.zeros((2, 80))}, "4 value heads are not a multiple of 3"),
        ({"state": {"conv": jnp.zeros((5, 3, 64))}}, r"state.conv must be \(5, 3, 1, 64\)"),
        ({"state": {"conv": jnp.zeros((5, 3, 1, 64), int)}}, "state.conv must hold floating"),
        ({"state": {"recurrent": jnp.zeros((5, 8, 32), jnp.bfloat16)}}, "must be float32"),
        ({"weights": {"D": jnp.zeros(4, jnp.bfloat16)}}, "weights.D must be float32"),
        ({"weights": {"conv_bias": jnp.zeros(8)}}, "weights.conv_bias must be"),
        ({"dt_limit": (1.0, 0.5)}, r"got \(1.0, 0.5\)"),
        ({"write_slots": jnp.zeros(3, jnp.int32)}, "write_slots must be"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    slot, heads = jnp.zeros(2, jnp.int32), jnp.zeros(4)
    arguments: dict[str, Any] = {
        "xBC": jnp.zeros((2, 64)),
        "dt": jnp.zeros((2, 4)),
        "state": op.States(jnp.zeros((5, 3, 1, 64)), jnp.zeros((5, 8, 32))),
        "ragged": Rows(decode=(1, 1)).ragged(),
        "read_slots": slot,
        "write_slots": slot,
        "weights": op.Weights(jnp.zeros((64, 4)), None, heads, heads, heads),
    }
    for name, value in change.items():
        nested = isinstance(value, dict)
        arguments[name] = arguments[name]._replace(**value) if nested else value
    with pytest.raises(ValueError, match=message):
        op.mamba2(**arguments)
