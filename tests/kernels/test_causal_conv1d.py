"""causal_conv1d against a float64 token-by-token oracle, on pools full of NaN."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_conv1d as op
from pallas_kernels import registry, storage
from pallas_kernels.causal_conv1d.cases import CASES, Case
from tests.helpers.ragged import Rows, convolution_oracle

SMALL = [case for case in CASES if case.name.startswith("tiny")]
LARGE = [case for case in CASES if not case.name.startswith("tiny")]
BATCHES = {
    "decode": Rows(decode=(0, 1, 2, 3, 4, 90), pad_rows=2),
    "one_decode": Rows(decode=(3,)),
    "shorter_than_the_width": Rows(prefill=((0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (5, 3))),
    "mixed": Rows(decode=(2, 0), prefill=((0, 3), (1, 4), (9, 1), (0, 30)), pad_rows=2,
                  pad_tokens=5),
    "padding": Rows(pad_rows=3),
    "padding_mixed": Rows(pad_rows=3, pad_tokens=8),
}  # fmt: skip
IMPLEMENTATIONS = registry.implementations("causal_conv1d", "cpu")


@functools.cache
def _jitted(implementation: str, activation: str | None):
    return jax.jit(
        functools.partial(op.causal_conv1d, implementation=implementation, activation=activation)
    )


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """What is left of `values` in `dtype`, as float64."""
    return np.asarray(jnp.asarray(values, dtype), np.float64)


def check(case: Case, rows: Rows, implementation: str, seed: int = 0) -> None:
    check_call(_jitted(implementation, case.activation), case, rows, seed)


def check_call(call: Callable[..., Any], case: Case, rows: Rows, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    keep = case.width - 1
    weight = rounded(rng.normal(size=(case.channels, case.width)), case.dtype)
    bias = rounded(rng.normal(size=case.channels), case.dtype) if case.bias else None
    slots = 2 * rows.num_rows + 2
    order = rng.permutation(np.arange(1, slots))
    read, write = (order[i : i + rows.num_rows].copy() for i in (0, rows.num_rows))
    write[::3] = read[::3]  # some rows update their slot in place
    x = np.full((rows.num_tokens, case.channels), np.nan)
    before = np.full((slots, keep, case.channels), np.nan)
    sequences = [rounded(rng.normal(size=(sum(row), case.channels)), case.dtype)
                 for row in rows.all]  # fmt: skip
    padded = [np.concatenate([np.zeros((keep, case.channels)), s]) for s in sequences]
    for row, (earlier, _) in enumerate(rows.all):
        x[rows.slices[row]] = sequences[row][earlier:]
        if earlier:
            before[read[row]] = padded[row][earlier : earlier + keep]
    after, expected = before.copy(), np.zeros(x.shape)
    for row, (earlier, _) in enumerate(rows.all):
        after[write[row]] = padded[row][-keep:]
        y = convolution_oracle(sequences[row], weight, bias, case.activation)
        expected[rows.slices[row]] = y[earlier:]
    read[len(rows.all) :] = write[len(rows.all) :] = 0
    y, state = call(
        jnp.asarray(x, case.dtype),
        jnp.asarray(weight, case.dtype),
        None if bias is None else jnp.asarray(bias, case.dtype),
        storage.encode(jnp.asarray(before, case.dtype), storage.storage_dtype(case.dtype)),
        rows.ragged(),
        jnp.asarray(read, jnp.int32),
        jnp.asarray(write, jnp.int32),
    )
    assert y.dtype == jnp.dtype(case.dtype)
    np.testing.assert_allclose(np.asarray(y, float), expected, rtol=0, atol=case.atol)
    np.testing.assert_array_equal(np.asarray(storage.decode(state), float)[1:], after[1:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_shapes(case: Case, batch: str, implementation: str) -> None:
    check(case, BATCHES[batch], implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_model_shapes(case: Case, implementation: str) -> None:
    check(case, Rows(decode=(0, 9), prefill=((0, 2), (3, 20)), pad_rows=1), implementation)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_random_batches(case: Case) -> None:
    rng = np.random.default_rng(13)
    for seed in range(8):
        decode = tuple(int(n) for n in rng.integers(0, 5, size=3))
        prefill = tuple((int(n), int(t)) for n, t in rng.integers((0, 1), (5, 9), size=(4, 2)))
        used = 3 + sum(t for _, t in prefill)
        check(case, Rows(decode, prefill, pad_rows=1, pad_tokens=48 - used), "reference", seed)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 20])
def test_dense(case: Case, num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    x, weight = rng.normal(size=(num_tokens, case.channels)), rng.normal(size=(case.channels, 4))
    x, weight = rounded(x, "float32"), rounded(weight, "float32")
    y = op.dense(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), None, "silu")
    np.testing.assert_allclose(
        y, convolution_oracle(x, weight, None, "silu"), rtol=0, atol=case.atol
    )


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 9])
def test_split_prefill_equals_unsplit(cut: int) -> None:
    case = SMALL[0]
    rng = np.random.default_rng(cut)
    total = 10
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32)
                 for shape in ((total, case.channels), (case.channels, case.width)))  # fmt: skip
    pool = jnp.full((3, case.width - 1, case.channels), jnp.nan)
    slot = jnp.asarray([1], jnp.int32)
    run = _jitted("reference", "silu")
    whole, state = run(x, weight, None, pool, Rows(prefill=((0, total),)).ragged(), slot, slot)
    parts, split = [], pool
    for begin, end in ((0, cut), (cut, total)):
        rows = Rows(prefill=((begin, end - begin),))
        y, split = run(x[begin:end], weight, None, split, rows.ragged(), slot, slot)
        parts.append(y)
    np.testing.assert_array_equal(jnp.concatenate(parts), whole)
    np.testing.assert_array_equal(split, state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": jnp.zeros((5, 4))}, "weight must be"),
        ({"weight": jnp.zeros((6, 1))}, "W >= 2"),
        ({"bias": jnp.zeros(5)}, "bias must be"),
        ({"state": jnp.zeros((3, 4, 6))}, "state must be"),
        ({"read_slots": jnp.zeros(3, jnp.int32)}, "read_slots must be"),
        ({"activation": "relu"}, "got 'relu'"),
        ({"x": jnp.zeros((3, 6))}, "tokens == rows, got 3 and 2"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    arguments = {
        "x": jnp.zeros((2, 6)),
        "weight": jnp.zeros((6, 4)),
        "bias": None,
        "state": jnp.zeros((3, 3, 6)),
        "ragged": Rows(decode=(1, 1)).ragged(),
        "read_slots": jnp.zeros(2, jnp.int32),
        "write_slots": jnp.zeros(2, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        op.causal_conv1d(**(arguments | change))
