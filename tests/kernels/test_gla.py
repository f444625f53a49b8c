"""gla against a float64 token-by-token oracle, on pools full of NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gla as op
from pallas_kernels import registry
from pallas_kernels.gla.cases import CASES, Case
from pallas_kernels.ragged import RaggedBatch
from tests.helpers import slots
from tests.helpers.ragged import Rows, gla_oracle
from tests.helpers.slots import BATCHES, Tokens, log_decay, rounded, unit

SMALL = [case for case in CASES if case.name.startswith("tiny")]
LARGE = [case for case in CASES if not case.name.startswith("tiny")]
IMPLEMENTATIONS = registry.implementations("gla", "cpu")


def draw(case: Case, num_tokens: int, seed: int = 0) -> Tokens:
    """Random operands [num_tokens, ...]."""
    rng = np.random.default_rng(seed)
    keys = (num_tokens, case.num_k_heads, case.k_dim)
    values = (num_tokens, case.num_v_heads, case.v_dim)
    arrays = {
        "q": unit(rng, *keys),
        "k": unit(rng, *keys),
        "v": rng.normal(size=values),
        "g": log_decay(rng, *values[:2], *[case.k_dim] * case.per_channel),
    }
    dtypes = dict.fromkeys(("q", "k", "v"), case.dtype) | {"g": "float32"}
    return Tokens(
        {name: rounded(x, dtypes[name]) for name, x in arrays.items()},
        dtypes,
        functools.partial(gla_oracle, scale=1.0),
        (case.num_v_heads, case.k_dim, case.v_dim),
        values[1:],
        case.dtype,
    )


@functools.cache
def _jitted(implementation: str):
    return jax.jit(functools.partial(op.gla, implementation=implementation, scale=1.0))


def check(case: Case, rows: Rows, implementation: str, seed: int = 0) -> None:
    tokens = draw(case, rows.num_tokens, seed)
    tolerances = {"atol": case.atol, "state_atol": case.state_atol}
    slots.check(_jitted(implementation), tokens, rows, seed=seed, **tolerances)


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
    out, final = jax.jit(functools.partial(form, scale=1.0))(
        **tokens.on_device(), initial=jnp.asarray(initial)
    )
    expected = tokens.oracle(**tokens.arrays, state=initial.astype(float))
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=case.atol)
    np.testing.assert_allclose(final, expected[1], rtol=0, atol=case.state_atol)


def test_gradients_of_both_forms_agree() -> None:
    tokens = draw(SMALL[1], 100, 5)
    names, arrays = zip(*tokens.on_device().items(), strict=True)

    def gradients(form) -> tuple[jax.Array, ...]:
        def loss(*arrays: jax.Array) -> jax.Array:
            out, final = form(*arrays)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final))

        return jax.jit(jax.grad(loss, argnums=range(4)))(*arrays)

    expected, actual = gradients(op.recurrent), gradients(op.chunked)
    for name, chunked, recurrent in zip(names, actual, expected, strict=True):
        size = float(jnp.max(jnp.abs(recurrent)))
        assert size > 1e-3  # a gradient of zeros would agree with anything
        np.testing.assert_allclose(chunked, recurrent, rtol=0, atol=1e-4 * size, err_msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": jnp.zeros((2, 1, 8))}, "k must be"),
        ({"g": jnp.zeros((2, 4, 6))}, r"g must be \(2, 4, 8\)"),
        ({"g": jnp.zeros((2, 4), jnp.bfloat16)}, "g must be float32"),
        ({"state": jnp.zeros((3, 4, 8, 4))}, "state must be"),
        ({"write_slots": jnp.zeros(3, jnp.int32)}, "write_slots must be"),
        ({"read_slots": jnp.zeros(2)}, "read_slots must be int32, got float32"),
        ({"v": jnp.zeros((2, 4, 6), jnp.int32)}, "v must be floating point, got int32"),
        ({"ragged": RaggedBatch(*[jnp.zeros(n) for n in (3, 2, 2)], True)}, "loc must be int32"),
        ({"ragged": RaggedBatch(*[jnp.zeros(n) for n in (1, 0, 2)], True)}, "at least one row"),
        ({"q": jnp.zeros((2, 3, 8)), "k": jnp.zeros((2, 3, 8))}, "not a multiple"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    arguments = {
        "q": jnp.zeros((2, 2, 8)),
        "k": jnp.zeros((2, 2, 8)),
        "v": jnp.zeros((2, 4, 6)),
        "g": jnp.zeros((2, 4)),
        "state": jnp.zeros((3, 4, 8, 6)),
        "ragged": Rows(decode=(1, 1)).ragged(),
        "read_slots": jnp.zeros(2, jnp.int32),
        "write_slots": jnp.zeros(2, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        op.gla(**(arguments | change))
