"""selective_scan against a float64 token-by-token oracle, on pools full of NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import registry
from pallas_kernels import selective_scan as op
from pallas_kernels.selective_scan.cases import CASES, Case
from tests.helpers import slots
from tests.helpers.ragged import Rows, selective_scan_oracle
from tests.helpers.slots import BATCHES, Tokens, rounded, unit

SMALL = [case for case in CASES if case.name.startswith("tiny")]
LARGE = [case for case in CASES if not case.name.startswith("tiny")]
IMPLEMENTATIONS = registry.implementations("selective_scan", "cpu")


def parameters(case: Case) -> dict[str, np.ndarray]:
    """A, D and dt_bias of a layer: A as models initialise it, dt_bias such that dt spreads."""
    rng = np.random.default_rng(7)
    rates = np.arange(1.0, case.state_size + 1)[:, None]
    return {
        "A": np.broadcast_to(-rates, (case.state_size, case.channels)),
        "D": rounded(rng.normal(size=case.channels), "float32"),
        "dt_bias": rounded(rng.uniform(-6, 1, size=case.channels), "float32"),
    }


def draw(case: Case, num_tokens: int, seed: int = 0) -> Tokens:
    """Random operands [num_tokens, ...]."""
    rng = np.random.default_rng(seed)
    arrays = {
        "x": rng.normal(size=(num_tokens, case.channels)),
        "dt": rng.normal(size=(num_tokens, case.channels)),
        "B": unit(rng, num_tokens, case.state_size),
        "C": unit(rng, num_tokens, case.state_size),
    }
    return Tokens(
        {name: rounded(x, case.dtype) for name, x in arrays.items()},
        dict.fromkeys(arrays, case.dtype),
        functools.partial(selective_scan_oracle, **parameters(case)),
        (case.state_size, case.channels),
        (case.channels,),
        case.dtype,
    )


def on_device(case: Case) -> dict[str, jax.Array]:
    """`parameters` as the op takes them."""
    return {name: jnp.asarray(x, jnp.float32) for name, x in parameters(case).items()}


@functools.cache
def _jitted(case: Case, implementation: str):
    call = functools.partial(op.selective_scan, implementation=implementation)
    return functools.partial(jax.jit(call), **on_device(case))


def check(case: Case, rows: Rows, implementation: str) -> None:
    tolerances = {"atol": case.atol, "state_atol": case.state_atol}
    slots.check(_jitted(case, implementation), draw(case, rows.num_tokens), rows, **tolerances)


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
    operands = tokens.on_device() | on_device(case)
    y, final = jax.jit(op.recurrent)(**operands, initial=jnp.asarray(initial))
    expected = tokens.oracle(**tokens.arrays, state=initial.astype(float))
    np.testing.assert_allclose(y, expected[0], rtol=0, atol=case.atol)
    np.testing.assert_allclose(final, expected[1], rtol=0, atol=case.state_atol)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dt": jnp.zeros((2, 1))}, "dt must be"),
        ({"A": jnp.zeros((6, 4))}, "A must be"),
        ({"A": jnp.zeros((4, 6), jnp.bfloat16)}, "A must be float32"),
        ({"dt_bias": jnp.zeros(4)}, "dt_bias must be"),
        ({"state": jnp.zeros((3, 6, 4))}, "state must be"),
        ({"read_slots": jnp.zeros(3, jnp.int32)}, "read_slots must be"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    arguments = {
        "x": jnp.zeros((2, 6)),
        "dt": jnp.zeros((2, 6)),
        "A": jnp.zeros((4, 6)),
        "B": jnp.zeros((2, 4)),
        "C": jnp.zeros((2, 4)),
        "D": None,
        "dt_bias": None,
        "state": jnp.zeros((3, 4, 6)),
        "ragged": Rows(decode=(1, 1)).ragged(),
        "read_slots": jnp.zeros(2, jnp.int32),
        "write_slots": jnp.zeros(2, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        op.selective_scan(**(arguments | change))
