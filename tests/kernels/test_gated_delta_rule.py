"""gated_delta_rule against a float64 token-by-token oracle, on pools full of NaN."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_delta_rule as op
from pallas_kernels import registry
from pallas_kernels.gated_delta_rule.cases import CASES, Case
from tests.helpers import slots
from tests.helpers.ragged import Rows, delta_rule_oracle
from tests.helpers.slots import BATCHES, Tokens, log_decay, rounded

SMALL = [case for case in CASES if case.name.startswith("tiny")]
LARGE = [case for case in CASES if not case.name.startswith("tiny")]
IMPLEMENTATIONS = registry.implementations("gated_delta_rule", "cpu")


def draw(case: Case, num_tokens: int, seed: int = 0) -> Tokens:
    """Random operands [num_tokens, ...]."""
    rng = np.random.default_rng(seed)
    keys = (num_tokens, case.num_k_heads, case.k_dim)
    values = (num_tokens, case.num_v_heads, case.v_dim)
    arrays = {
        "q": rng.normal(size=keys),
        "k": rng.normal(size=keys),
        "v": rng.normal(size=values),
        "g": log_decay(rng, *values[:2], *[case.k_dim] * case.per_channel),
        "beta": rng.uniform(0, case.max_beta, size=values[:2]),
    }
    dtypes = dict.fromkeys(("q", "k", "v"), case.dtype) | dict.fromkeys(("g", "beta"), "float32")
    return Tokens(
        {name: rounded(x, dtypes[name]) for name, x in arrays.items()},
        dtypes,
        functools.partial(delta_rule_oracle, scale=case.k_dim**-0.5),
        (case.num_v_heads, case.k_dim, case.v_dim),
        values[1:],
        case.dtype,
    )


def nearly_equal_keys(case: Case, num_tokens: int) -> Tokens:
    """Repeated keys, full write strength, next to no decay."""
    tokens = draw(case, num_tokens, 3)
    arrays = dict(tokens.arrays)
    arrays["k"] = arrays["k"][:1] + 1e-2 * arrays["k"]
    arrays["beta"] = case.max_beta - 1e-3 * arrays["beta"]
    arrays["g"] = 1e-5 * arrays["g"]
    return replace(tokens, arrays=arrays)


@functools.cache
def _jitted(implementation: str):
    return jax.jit(functools.partial(op.gated_delta_rule, implementation=implementation))


def check(case: Case, rows: Rows, implementation: str, seed: int = 0) -> None:
    tokens = draw(case, rows.num_tokens, seed)
    tolerances = {"atol": case.atol, "state_atol": case.state_atol}
    slots.check(_jitted(implementation), tokens, rows, seed=seed, **tolerances)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_shapes(case: Case, batch: str, implementation: str) -> None:
    check(case, BATCHES[batch], implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_model_shapes(case: Case, implementation: str) -> None:
    check(case, Rows(decode=(0, 9), prefill=((0, 5), (3, 70)), pad_rows=1), implementation)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_random_batches(case: Case) -> None:
    rng = np.random.default_rng(11)
    for seed in range(6):
        decode = tuple(int(n) for n in rng.integers(0, 3, size=2))
        prefill = tuple((int(n), int(t)) for n, t in rng.integers((0, 1), (3, 90), size=(3, 2)))
        check(case, Rows(decode, prefill).padded(9, 330), "reference", seed)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("form", [op.recurrent, op.chunked])
@pytest.mark.parametrize("num_tokens", [0, 1, 64, 150])
def test_dense_forms(case: Case, form, num_tokens: int) -> None:
    tokens = draw(case, num_tokens, num_tokens)
    initial = np.random.default_rng(1).normal(size=tokens.state_shape).astype(np.float32)
    out, final = jax.jit(form)(**tokens.on_device(), initial=jnp.asarray(initial))
    expected = tokens.oracle(**tokens.arrays, state=initial.astype(float))
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=case.atol)
    np.testing.assert_allclose(final, expected[1], rtol=0, atol=case.state_atol)


@pytest.mark.parametrize("form", [op.recurrent, op.chunked])
def test_without_an_initial_state_it_is_zero(form) -> None:
    tokens = draw(SMALL[0], 3)
    out, final = form(**tokens.on_device())
    expected = tokens.oracle(**tokens.arrays, state=np.zeros(tokens.state_shape))
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=SMALL[0].atol)
    np.testing.assert_allclose(final, expected[1], rtol=0, atol=SMALL[0].state_atol)


@pytest.mark.parametrize("max_beta", [1.0, 2.0])
def test_chunked_with_nearly_equal_keys(max_beta: float) -> None:
    """Repeated keys, full write strength, no decay: a series in powers of A explodes here."""
    case = Case("correlated", 2, 4, 16, 16, max_beta)
    tokens = nearly_equal_keys(case, 200)
    arrays = tokens.on_device()
    exact = {name: np.asarray(x, float) for name, x in arrays.items()}
    expected = tokens.oracle(**exact, state=np.zeros((4, 16, 16)))
    errors = {}
    for form in (op.recurrent, op.chunked):
        out, final = jax.jit(form)(**arrays)
        errors[form] = [float(np.abs(np.subtract(x, y)).max())
                        for x, y in zip((out, final), expected, strict=True)]  # fmt: skip
    # Near beta = 2 every step is a reflection and (I + A)^-1 is full of +-2: products with it
    # cancel, which costs the chunked form about one digit (measured: 7 times the error of the
    # token-by-token form, whose own errors add up over time). A power series would lose all.
    for chunked, recurrent in zip(errors[op.chunked], errors[op.recurrent], strict=True):
        assert chunked <= 16 * recurrent + 1e-5
        assert recurrent < 2e-3


@pytest.mark.parametrize("correlated", [False, True])
def test_gradients_of_both_forms_agree(correlated: bool) -> None:
    case = Case("gradient", 2, 4, 8, 12)
    tokens = nearly_equal_keys(case, 100) if correlated else draw(case, 100, 5)
    names = ("q", "k", "v", "g", "beta", "initial")
    arrays = [jnp.stack([x, 0.5 * x]) for x in tokens.on_device().values()]
    initial = jnp.asarray(np.random.default_rng(6).normal(size=(2, 4, 8, 12)), jnp.float32)

    def gradients(form) -> tuple[jax.Array, ...]:
        def loss(*arrays: jax.Array) -> jax.Array:
            out, final = jax.vmap(form)(*arrays)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final))

        return jax.jit(jax.grad(loss, argnums=range(6)))(*arrays, initial)

    expected, actual = gradients(op.recurrent), gradients(op.chunked)
    for name, chunked, recurrent in zip(names, actual, expected, strict=True):
        size = float(jnp.max(jnp.abs(recurrent)))
        assert size > 1e-3  # a gradient of zeros would agree with anything
        np.testing.assert_allclose(chunked, recurrent, rtol=0, atol=1e-4 * size, err_msg=name)


@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65, 127, 129])
def test_split_prefill_equals_unsplit(cut: int) -> None:
    case = SMALL[0]
    total = 130
    tokens = draw(case, total, cut).on_device()
    pool = jnp.full((4, case.num_v_heads, case.k_dim, case.v_dim), jnp.nan)
    slot = jnp.asarray([2], jnp.int32)
    run = _jitted("reference")
    whole, state = run(**tokens, state=pool, ragged=Rows(prefill=((0, total),)).ragged(),
                       read_slots=slot, write_slots=slot)  # fmt: skip
    parts, split = [], pool
    for begin, end in ((0, cut), (cut, total)):
        part = {name: x[begin:end] for name, x in tokens.items()}
        rows = Rows(prefill=((begin, end - begin),))
        out, split = run(**part, state=split, ragged=rows.ragged(), read_slots=slot,
                         write_slots=slot)  # fmt: skip
        parts.append(out)
    np.testing.assert_allclose(jnp.concatenate(parts), whole, rtol=0, atol=case.atol)
    np.testing.assert_allclose(split, state, rtol=0, atol=case.state_atol)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": jnp.zeros((2, 1, 8))}, "k must be"),
        ({"g": jnp.zeros((2, 4), jnp.bfloat16)}, "g must be float32"),
        ({"state": jnp.zeros((3, 4, 8, 4))}, "state must be"),
        ({"state": jnp.zeros((3, 4, 8, 6), jnp.float16)}, "state must hold float32 or bfloat16"),
        ({"write_slots": jnp.zeros(3, jnp.int32)}, "write_slots must be"),
        ({"q": jnp.zeros((2, 3, 8)), "k": jnp.zeros((2, 3, 8))}, "not a multiple"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    arguments = {
        "q": jnp.zeros((2, 2, 8)),
        "k": jnp.zeros((2, 2, 8)),
        "v": jnp.zeros((2, 4, 6)),
        "g": jnp.zeros((2, 4)),
        "beta": jnp.zeros((2, 4)),
        "state": jnp.zeros((3, 4, 8, 6)),
        "ragged": Rows(decode=(1, 1)).ragged(),
        "read_slots": jnp.zeros(2, jnp.int32),
        "write_slots": jnp.zeros(2, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        op.gated_delta_rule(**(arguments | change))


def test_chunk_must_be_a_power_of_two() -> None:
    tokens = draw(SMALL[0], 4).on_device()
    with pytest.raises(ValueError, match="power of two, got 48"):
        op.chunked(**tokens, chunk=48)
