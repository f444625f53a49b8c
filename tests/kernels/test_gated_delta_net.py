"""gated_delta_net against a float64 token-by-token oracle, on pools full of NaN."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_conv1d, registry, storage
from pallas_kernels import gated_delta_net as op
from pallas_kernels.gated_delta_net.cases import CASES, Case
from tests.helpers.ragged import Rows, delta_net_oracle
from tests.helpers.slots import BATCHES, rounded

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


def slots_of(
    rows: Rows, rng: np.random.Generator, shared: bool
) -> tuple[int, np.ndarray, np.ndarray]:
    """How many slots there are; those to read and those to write, of which some are the same."""
    slots = 2 * rows.num_rows + 2
    order = rng.permutation(np.arange(1, slots))
    read, write = (order[i : i + rows.num_rows].copy() for i in (0, rows.num_rows))
    write[::3] = read[::3]  # some rows update their slot in place
    if shared:
        read[:], write[:] = order[0], order[1 : rows.num_rows + 1]
    return slots, read, write


def pools_of(
    case: Case, rows: Rows, slots: int, read: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Of the convolution and the recurrence: NaN but where a row with earlier tokens reads."""
    keep, state = case.width - 1, (case.num_v_heads, case.k_dim, case.v_dim)
    conv = np.full((slots, keep, case.channels), np.nan)
    recurrent = np.full((slots, *state), np.nan)
    for row, (earlier, _) in enumerate(rows.all):
        if earlier:
            inputs = rounded(rng.normal(size=conv.shape[1:]), case.dtype)
            inputs[: max(keep - earlier, 0)] = 0
            conv[read[row]] = inputs
            recurrent[read[row]] = rng.normal(size=state).astype(np.float32)
    return conv, recurrent


def check_call(
    call: Callable[..., Any], case: Case, rows: Rows, seed: int = 0, *, shared: bool = False
) -> None:
    """Out and every slot of both pools. `shared`: all rows read the same slot.

    Everything that must not be read is NaN: padding tokens, free slots, and the slots of rows
    without earlier tokens.
    """
    rng = np.random.default_rng(seed)
    heads, tokens = case.num_v_heads, rows.num_tokens
    decays = (heads, case.k_dim)[: 1 + case.per_channel]
    shapes = {"qkv": (case.channels,), "a": decays, "b": (heads,)}
    arrays = {
        name: rounded(rng.normal(size=(tokens, *shape)), case.dtype)
        for name, shape in shapes.items()
    }
    for array in arrays.values():
        array[sum(query for _, query in rows.all) :] = np.nan
    slots, read, write = slots_of(rows, rng, shared)
    used, (conv, recurrent) = len(rows.all), pools_of(case, rows, slots, read, rng)
    known = {"k_heads": case.num_k_heads, "max_beta": 1.0 + case.allow_neg_eigval}
    expected, after = np.zeros((tokens, heads, case.v_dim)), (conv.copy(), recurrent.copy())
    for row, (earlier, _) in enumerate(rows.all):
        part = {name: x[rows.slices[row]] for name, x in arrays.items()}
        before = [x[read[row]] if earlier else np.zeros(x.shape[1:]) for x in (conv, recurrent)]
        expected[rows.slices[row]], *new = delta_net_oracle(
            **part, conv=before[0], recurrent=before[1], **parameters(case, seed), **known
        )
        for pool, value in zip(after, new, strict=True):
            pool[write[row]] = value
    read[used:] = write[used:] = 0
    stored = storage.encode(jnp.asarray(conv, case.dtype), storage.storage_dtype(case.dtype))
    pool = stored.reshape(causal_conv1d.state_shape(slots, *conv.shape[1:]))
    out, new = call(
        **{name: jnp.asarray(x, case.dtype) for name, x in arrays.items()},
        state=op.States(pool, jnp.asarray(recurrent, jnp.float32)),
        ragged=rows.ragged(),
        read_slots=jnp.asarray(read, jnp.int32),
        write_slots=jnp.asarray(write, jnp.int32),
        weights=options(case, seed)["weights"],
    )
    assert out.dtype == jnp.dtype(case.dtype)
    np.testing.assert_allclose(np.asarray(out, float), expected, rtol=0, atol=case.atol)
    inputs = np.asarray(storage.decode(new.conv), float).reshape(conv.shape)
    np.testing.assert_array_equal(inputs[1:], after[0][1:])
    states = np.asarray(new.recurrent, float)
    np.testing.assert_allclose(states, after[1], rtol=0, atol=case.state_atol)
    untouched = [slot for slot in range(slots) if slot not in write[:used]]
    np.testing.assert_array_equal(states[untouched], recurrent[untouched])


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
