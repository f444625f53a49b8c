"""States stored in bfloat16: computed in float32, rounded once per write, as bits or as values."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import gated_delta_rule as op
from pallas_kernels.storage import decode, encode
from tests.helpers.ragged import Rows, delta_rule_oracle

K_HEADS, SHAPE = 2, (4, 8, 16)  # value heads, key and value dims
SCALE = SHAPE[1] ** -0.5
ULP = 2.0**-7  # the largest step between neighbours in bfloat16, relative
ATOL = 1e-4  # of float32 sums against float64 ones, over states of a few units


def draw(num_tokens: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random operands [num_tokens, ...] that float32 holds, as float64."""
    keys, values = (num_tokens, K_HEADS, SHAPE[1]), (num_tokens, SHAPE[0], SHAPE[2])
    arrays = {
        "q": rng.normal(size=keys),
        "k": rng.normal(size=keys),
        "v": rng.normal(size=values),
        "g": -np.exp(rng.uniform(-7, 1, size=values[:2])),
        "beta": rng.uniform(0, 1, size=values[:2]),
    }
    return {name: x.astype(np.float32).astype(np.float64) for name, x in arrays.items()}


def on_device(tokens: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(x, jnp.float32) for name, x in tokens.items()}


@pytest.mark.parametrize("storage", ["uint16", "bfloat16"])
def test_forty_tokens_are_those_of_an_oracle_that_rounds(storage: str) -> None:
    """Slot to slot and back; what is not written keeps its bits."""
    rng = np.random.default_rng(5)
    tokens = draw(40, rng)
    start = rng.normal(size=SHAPE).astype(ml_dtypes.bfloat16).astype(np.float64)
    state = encode(jnp.asarray(np.stack([np.full(SHAPE, np.nan), start, start * 2]), jnp.float32),
                   storage)  # fmt: skip
    expected, worst = start, 0.0
    call = jax.jit(op.gated_delta_rule)
    for i in range(40):
        part = {name: x[i : i + 1] for name, x in tokens.items()}
        out_oracle, after = delta_rule_oracle(**part, state=expected, scale=SCALE)
        out, state = call(
            **on_device(part),
            state=state,
            ragged=Rows(decode=(3,), prefill=(), pad_rows=0).ragged(),
            read_slots=jnp.ones(1, jnp.int32),
            write_slots=jnp.ones(1, jnp.int32),
        )
        assert state.dtype == jnp.dtype(storage)
        np.testing.assert_allclose(np.asarray(out, float), out_oracle, rtol=0, atol=ATOL)
        stored = np.asarray(decode(state).astype(jnp.float32), np.float64)
        rounded = after.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        # A value next to the middle between two bfloat16 may be rounded either way.
        assert (np.abs(stored[1] - rounded) <= ULP * np.abs(rounded) + 1e-6).all()
        worst = max(worst, float((stored[1] != rounded).mean()))
        expected = stored[1]
        np.testing.assert_array_equal(stored[2], start * 2)
    assert worst < 0.01


def test_prefill_rounds_the_final_state() -> None:
    rng = np.random.default_rng(6)
    tokens = draw(30, rng)
    state = encode(jnp.full((3, *SHAPE), jnp.nan, jnp.float32), "uint16")
    out, state = jax.jit(op.gated_delta_rule)(
        **on_device(tokens),
        state=state,
        ragged=Rows(decode=(), prefill=((0, 30),), pad_rows=0).ragged(),
        read_slots=jnp.full(1, 2, jnp.int32),
        write_slots=jnp.full(1, 2, jnp.int32),
    )
    expected, after = delta_rule_oracle(**tokens, state=np.zeros(SHAPE), scale=SCALE)
    np.testing.assert_allclose(np.asarray(out, float), expected, rtol=0, atol=ATOL)
    stored = np.asarray(decode(state[2]).astype(jnp.float32), np.float64)
    assert (np.abs(stored - after) <= ULP * np.abs(after) + ATOL).all()
