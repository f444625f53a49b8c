"""rwkv7 against a float64 token-by-token oracle, on pools full of NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import registry
from pallas_kernels import rwkv7 as op
from pallas_kernels.rwkv7.cases import CASES, Case
from tests.helpers import slots
from tests.helpers.ragged import Rows, delta_rule_oracle, rwkv7_oracle
from tests.helpers.slots import BATCHES, Tokens, log_decay, rounded, unit

SMALL = [case for case in CASES if case.name.startswith("tiny")]
LARGE = [case for case in CASES if not case.name.startswith("tiny")]
IMPLEMENTATIONS = registry.implementations("rwkv7", "cpu")


def draw(case: Case, num_tokens: int, seed: int = 0) -> Tokens:
    """Random operands [num_tokens, ...], a and b as the model has them."""
    rng = np.random.default_rng(seed)
    keys, values = (num_tokens, case.heads, case.k_dim), (num_tokens, case.heads, case.v_dim)
    kappa = unit(rng, *keys)
    arrays = {
        "r": unit(rng, *keys),
        "w": log_decay(rng, *keys),
        "k": unit(rng, *keys),
        "v": rng.normal(size=values),
        "a": -kappa,
        "b": kappa * rng.uniform(0, 1, size=keys),
    }
    dtypes = dict.fromkeys(arrays, case.dtype) | {"w": "float32"}
    return Tokens(
        {name: rounded(x, dtypes[name]) for name, x in arrays.items()},
        dtypes,
        rwkv7_oracle,
        (case.k_dim, case.heads * case.v_dim),
        values[1:],
        case.dtype,
    )


@functools.cache
def _jitted(implementation: str):
    return jax.jit(functools.partial(op.rwkv7, implementation=implementation))


def check(case: Case, rows: Rows, implementation: str) -> None:
    tolerances = {"atol": case.atol, "state_atol": case.state_atol}
    slots.check(_jitted(implementation), draw(case, rows.num_tokens), rows, **tolerances)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_shapes(case: Case, batch: str, implementation: str) -> None:
    check(case, BATCHES[batch], implementation)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_model_shapes(case: Case, implementation: str) -> None:
    check(case, Rows(decode=(0, 9), prefill=((0, 5), (3, 40)), pad_rows=1), implementation)


@pytest.mark.parametrize("num_tokens", [0, 1, 150])
def test_dense_form(num_tokens: int) -> None:
    case = SMALL[0]
    tokens = draw(case, num_tokens, num_tokens)
    initial = np.random.default_rng(1).normal(size=tokens.state_shape).astype(np.float32)
    out, final = jax.jit(op.recurrent)(**tokens.on_device(), initial=jnp.asarray(initial))
    expected = tokens.oracle(**tokens.arrays, state=initial.astype(float))
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=case.atol)
    np.testing.assert_allclose(final, expected[1], rtol=0, atol=case.state_atol)


def test_the_delta_rule_is_a_case_of_it() -> None:
    """a = k, b = -beta e^g k and keys beta k, with one decay per head."""
    case = SMALL[0]
    drawn = draw(case, 50).arrays
    g, beta = drawn["w"][:, :, :1], np.random.default_rng(2).uniform(size=(50, case.heads, 1))
    q, k, v = drawn["r"], drawn["k"], drawn["v"]
    state = np.zeros((case.heads, case.k_dim, case.v_dim))
    expected = delta_rule_oracle(q, k, v, g[:, :, 0], beta[:, :, 0], state, scale=1.0, l2norm=False)
    operands = (q, np.broadcast_to(g, k.shape), beta * k, v, k, -beta * np.exp(g) * k)
    actual = op.recurrent(*(jnp.asarray(x, jnp.float32) for x in operands))
    final = np.swapaxes(expected[1], 0, 1).reshape(case.k_dim, -1)
    for ours, theirs in zip(actual, (expected[0], final), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=case.atol)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": jnp.zeros((2, 1, 8))}, "b must be"),
        ({"w": jnp.zeros((2, 4, 8), jnp.bfloat16)}, "w must be float32"),
        ({"state": jnp.zeros((3, 4, 6, 8))}, "state must be"),
        ({"read_slots": jnp.zeros(3, jnp.int32)}, "read_slots must be"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    arguments = {
        **{name: jnp.zeros((2, 4, 8)) for name in ("r", "w", "k", "a", "b")},
        "v": jnp.zeros((2, 4, 6)),
        "state": jnp.zeros((3, 8, 24)),
        "ragged": Rows(decode=(1, 1)).ragged(),
        "read_slots": jnp.zeros(2, jnp.int32),
        "write_slots": jnp.zeros(2, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        op.rwkv7(**(arguments | change))
