"""ssd against a float64 token-by-token oracle, on pools full of NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import registry
from pallas_kernels import ssd as op
from pallas_kernels.ssd.cases import CASES, Case
from tests.helpers import slots
from tests.helpers.ragged import Rows, ssd_oracle
from tests.helpers.slots import BATCHES, Tokens, rounded, unit

SMALL = [case for case in CASES if case.name.startswith("tiny")]
LARGE = [case for case in CASES if not case.name.startswith("tiny")]
IMPLEMENTATIONS = registry.implementations("ssd", "cpu")


def parameters(case: Case) -> dict[str, np.ndarray]:
    """A, D and dt_bias of a layer: A as models initialise it, dt_bias such that dt spreads."""
    rng = np.random.default_rng(7)
    return {
        "A": rounded(-rng.uniform(1, 16, size=case.heads), "float32"),
        "D": rounded(rng.normal(size=case.heads), "float32"),
        "dt_bias": rounded(rng.uniform(-6, 1, size=case.heads), "float32"),
    }


def draw(case: Case, num_tokens: int, seed: int = 0) -> Tokens:
    """Random operands [num_tokens, ...]."""
    rng = np.random.default_rng(seed)
    weights, values = (
        (num_tokens, case.groups, case.state_size),
        (num_tokens, case.heads, case.head_dim),
    )
    arrays = {
        "x": rng.normal(size=values),
        "dt": rng.normal(size=values[:2]),
        "B": unit(rng, *weights),
        "C": unit(rng, *weights),
    }
    dtypes = dict.fromkeys(arrays, case.dtype)
    return Tokens(
        {name: rounded(x, case.dtype) for name, x in arrays.items()},
        dtypes,
        functools.partial(ssd_oracle, **parameters(case), dt_limit=case.dt_limit),
        (case.state_size, case.heads * case.head_dim),
        values[1:],
        case.dtype,
    )


def on_device(case: Case) -> dict[str, jax.Array]:
    """`parameters` as the op takes them."""
    return {name: jnp.asarray(x, jnp.float32) for name, x in parameters(case).items()}


@functools.cache
def _jitted(case: Case, implementation: str):
    call = functools.partial(op.ssd, implementation=implementation, dt_limit=case.dt_limit)
    return functools.partial(jax.jit(call), **on_device(case))


def check(case: Case, rows: Rows, implementation: str, seed: int = 0) -> None:
    tokens = draw(case, rows.num_tokens, seed)
    tolerances = {"atol": case.atol, "state_atol": case.state_atol}
    slots.check(_jitted(case, implementation), tokens, rows, seed=seed, **tolerances)


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


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("form", [op.recurrent, op.chunked])
@pytest.mark.parametrize("num_tokens", [0, 1, 150])
def test_dense_forms(case: Case, form, num_tokens: int) -> None:
    tokens = draw(case, num_tokens, num_tokens)
    initial = np.random.default_rng(1).normal(size=tokens.state_shape).astype(np.float32)
    out, final = jax.jit(functools.partial(form, dt_limit=case.dt_limit))(
        **tokens.on_device(), **on_device(case), initial=jnp.asarray(initial)
    )
    expected = tokens.oracle(**tokens.arrays, state=initial.astype(float))
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=case.atol)
    np.testing.assert_allclose(final, expected[1], rtol=0, atol=case.state_atol)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"C": jnp.zeros((2, 1, 8))}, "C must be"),
        ({"A": jnp.zeros(3)}, "A must be"),
        ({"A": jnp.zeros(4, jnp.bfloat16)}, "A must be float32"),
        ({"D": jnp.zeros((4, 6))}, "D must be"),
        ({"state": jnp.zeros((3, 4, 6, 8))}, "state must be"),
        ({"read_slots": jnp.zeros(3, jnp.int32)}, "read_slots must be"),
        ({"B": jnp.zeros((2, 3, 8)), "C": jnp.zeros((2, 3, 8))}, "not a multiple"),
        ({"dt_limit": (1.0, 0.5)}, r"got \(1.0, 0.5\)"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    arguments = {
        "x": jnp.zeros((2, 4, 6)),
        "dt": jnp.zeros((2, 4)),
        "A": jnp.zeros(4),
        "B": jnp.zeros((2, 2, 8)),
        "C": jnp.zeros((2, 2, 8)),
        "D": None,
        "dt_bias": None,
        "state": jnp.zeros((3, 8, 24)),
        "ragged": Rows(decode=(1, 1)).ragged(),
        "read_slots": jnp.zeros(2, jnp.int32),
        "write_slots": jnp.zeros(2, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        op.ssd(**(arguments | change))
