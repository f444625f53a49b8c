"""gated_delta_rule against a float64 token-by-token oracle, on pools full of NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_delta_rule as op
from pallas_kernels import registry
from pallas_kernels.gated_delta_rule.cases import CASES, Case
from tests.helpers.ragged import Rows, delta_rule_oracle

SMALL = [case for case in CASES if case.name.startswith("tiny")]
LARGE = [case for case in CASES if not case.name.startswith("tiny")]
BATCHES = {
    "decode": Rows(decode=(0, 1, 5, 100), pad_rows=2),
    "one_decode": Rows(decode=(3,)),
    "one_token_prompts": Rows(prefill=((0, 1), (0, 1), (4, 1)), pad_rows=1),
    "mixed": Rows(decode=(3, 0), prefill=((0, 63), (2, 64), (0, 65), (9, 1)), pad_rows=2,
                  pad_tokens=7),
    "long_prefill": Rows(prefill=((0, 193), (64, 130)), pad_tokens=3),
    "padding": Rows(pad_rows=3),
    "padding_mixed": Rows(pad_rows=3, pad_tokens=8),
}  # fmt: skip
IMPLEMENTATIONS = registry.implementations("gated_delta_rule")


def draw(case: Case, num_tokens: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random operands [num_tokens, ...], rounded to the dtype under test, as float64."""
    k_shape = (num_tokens, case.num_k_heads, case.k_dim)
    v_shape = (num_tokens, case.num_v_heads, case.v_dim)
    drawn = {"q": rng.normal(size=k_shape), "k": rng.normal(size=k_shape)}
    drawn["v"] = rng.normal(size=v_shape)
    rounded = {n: np.asarray(jnp.asarray(x, case.dtype), np.float64) for n, x in drawn.items()}
    # Decays from none to nearly everything, as trained gates have.
    g = -np.exp(rng.uniform(-7, 2, size=v_shape[:2]))
    beta = rng.uniform(0, case.max_beta, size=v_shape[:2])
    return rounded | {n: x.astype(np.float32).astype(float) for n, x in (("g", g), ("beta", beta))}


def on_device(case: Case, tokens: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    dtypes = {"q": case.dtype, "k": case.dtype, "v": case.dtype, "g": "float32", "beta": "float32"}
    return {name: jnp.asarray(tokens[name], dtype) for name, dtype in dtypes.items()}


@functools.cache
def _jitted(implementation: str):
    return jax.jit(functools.partial(op.gated_delta_rule, implementation=implementation))


def check(case: Case, rows: Rows, implementation: str, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    tokens = draw(case, rows.num_tokens, rng)
    used = sum(query for _, query in rows.all)
    for array in tokens.values():
        array[used:] = np.nan  # padding tokens
    slots = 2 * rows.num_rows + 2
    order = rng.permutation(np.arange(1, slots))
    read, write = (order[i : i + rows.num_rows].copy() for i in (0, rows.num_rows))
    write[::3] = read[::3]  # some rows update their slot in place
    shape = (case.num_v_heads, case.k_dim, case.v_dim)
    before = np.full((slots, *shape), np.nan)
    expected_out = np.zeros((rows.num_tokens, case.num_v_heads, case.v_dim))
    states = [rng.normal(size=shape).astype(np.float32) for _ in rows.all]
    for row, (earlier, _) in enumerate(rows.all):
        if earlier:
            before[read[row]] = states[row]
    after = before.copy()
    for row, (earlier, _) in enumerate(rows.all):
        part = {name: x[rows.slices[row]] for name, x in tokens.items()}
        initial = states[row].astype(float) if earlier else np.zeros(shape)
        expected_out[rows.slices[row]], after[write[row]] = delta_rule_oracle(
            **part, state=initial, scale=case.k_dim**-0.5
        )
    read[len(rows.all) :] = write[len(rows.all) :] = 0
    out, state = _jitted(implementation)(
        **on_device(case, tokens),
        state=jnp.asarray(before, jnp.float32),
        ragged=rows.ragged(),
        read_slots=jnp.asarray(read, jnp.int32),
        write_slots=jnp.asarray(write, jnp.int32),
    )
    assert out.dtype == jnp.dtype(case.dtype)
    np.testing.assert_allclose(np.asarray(out, float), expected_out, rtol=0, atol=case.atol)
    state = np.asarray(state, float)
    np.testing.assert_allclose(state[1:], after[1:], rtol=0, atol=case.state_atol)
    untouched = [slot for slot in range(1, slots) if slot not in write[: len(rows.all)]]
    np.testing.assert_array_equal(state[untouched], before[untouched])


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
        used = 2 + sum(t for _, t in prefill)
        check(case, Rows(decode, prefill, pad_rows=1, pad_tokens=280 - used), "reference", seed)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("form", [op.recurrent, op.chunked])
@pytest.mark.parametrize("num_tokens", [0, 1, 64, 65, 150])
def test_dense_forms(case: Case, form, num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    tokens = draw(case, num_tokens, rng)
    initial = rng.normal(size=(case.num_v_heads, case.k_dim, case.v_dim)).astype(np.float32)
    for state in (None, initial):
        given = None if state is None else jnp.asarray(state)
        out, final = jax.jit(form)(**on_device(case, tokens), initial=given)
        start = np.zeros(initial.shape) if state is None else state.astype(float)
        expected = delta_rule_oracle(**tokens, state=start, scale=case.k_dim**-0.5)
        np.testing.assert_allclose(out, expected[0], rtol=0, atol=case.atol)
        np.testing.assert_allclose(final, expected[1], rtol=0, atol=case.state_atol)


@pytest.mark.parametrize("max_beta", [1.0, 2.0])
def test_chunked_with_nearly_equal_keys(max_beta: float) -> None:
    """Repeated keys, full write strength, no decay: a series in powers of A explodes here."""
    case = Case("correlated", 2, 4, 16, 16, max_beta)
    rng = np.random.default_rng(3)
    tokens = draw(case, 200, rng)
    tokens["k"] = tokens["k"][:1] + 1e-2 * tokens["k"]
    tokens["beta"] = max_beta - 1e-3 * tokens["beta"]
    tokens["g"] = 1e-5 * tokens["g"]
    arrays = on_device(case, tokens)
    exact = {name: np.asarray(x, float) for name, x in arrays.items()}
    state = np.zeros((4, 16, 16))
    expected = delta_rule_oracle(**exact, state=state, scale=case.k_dim**-0.5)
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
    tokens = draw(case, 100, np.random.default_rng(5))
    if correlated:
        tokens["k"] = tokens["k"][:1] + 1e-2 * tokens["k"]
        tokens["g"] = 1e-4 * tokens["g"]
    names = ("q", "k", "v", "g", "beta", "initial")
    arrays = [jnp.stack([x, 0.5 * x]) for x in on_device(case, tokens).values()]
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
    tokens = on_device(case, draw(case, total, np.random.default_rng(cut)))
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
        ({"state": jnp.zeros((3, 4, 8, 6), jnp.bfloat16)}, "state must be float32"),
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
    tokens = on_device(SMALL[0], draw(SMALL[0], 4, np.random.default_rng(0)))
    with pytest.raises(ValueError, match="power of two, got 48"):
        op.chunked(**tokens, chunk=48)
