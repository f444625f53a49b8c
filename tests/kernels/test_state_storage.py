"""States stored in bfloat16: computed in float32, rounded once per write, as bits or as values."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import gated_delta_rule as op
from pallas_kernels.gated_delta_rule.cases import CASES
from pallas_kernels.storage import decode, encode
from tests.helpers.ragged import Rows, delta_rule_oracle
from tests.kernels.test_gated_delta_rule import draw, on_device

CASE = next(case for case in CASES if case.dtype == "float32" and case.num_v_heads < 8)
SHAPE = (CASE.num_v_heads, CASE.k_dim, CASE.v_dim)
ULP = 2.0**-8  # of bfloat16, relative


@pytest.mark.parametrize("storage", ["uint16", "bfloat16"])
def test_forty_tokens_are_those_of_an_oracle_that_rounds(storage: str) -> None:
    """Slot to slot and back; what is not written keeps its bits."""
    rng = np.random.default_rng(5)
    tokens = draw(CASE, 40, rng)
    start = rng.normal(size=SHAPE).astype(ml_dtypes.bfloat16).astype(np.float64)
    state = encode(jnp.asarray(np.stack([np.full(SHAPE, np.nan), start, start * 2]), jnp.float32),
                   storage)  # fmt: skip
    expected, worst = start, 0.0
    call = jax.jit(op.gated_delta_rule)
    for i in range(40):
        part = {name: x[i : i + 1] for name, x in tokens.items()}
        out_oracle, after = delta_rule_oracle(**part, state=expected, scale=CASE.k_dim**-0.5)
        out, state = call(
            **on_device(CASE, part),
            state=state,
            ragged=Rows(decode=(3,), prefill=(), pad_rows=0).ragged(),
            read_slots=jnp.ones(1, jnp.int32),
            write_slots=jnp.ones(1, jnp.int32),
        )
        assert state.dtype == jnp.dtype(storage)
        np.testing.assert_allclose(np.asarray(out, float), out_oracle, rtol=0, atol=CASE.atol)
        stored = np.asarray(decode(state).astype(jnp.float32), np.float64)
        rounded = after.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        # A value next to the middle between two bfloat16 may be rounded either way.
        assert (np.abs(stored[1] - rounded) <= ULP * np.abs(rounded)).all()
        worst = max(worst, float((stored[1] != rounded).mean()))
        expected = stored[1]
        np.testing.assert_array_equal(stored[2], start * 2)
    assert worst < 0.01


def test_prefill_rounds_the_final_state() -> None:
    rng = np.random.default_rng(6)
    tokens = draw(CASE, 30, rng)
    state = encode(jnp.full((3, *SHAPE), jnp.nan, jnp.float32), "uint16")
    out, state = jax.jit(op.gated_delta_rule)(
        **on_device(CASE, tokens),
        state=state,
        ragged=Rows(decode=(), prefill=((0, 30),), pad_rows=0).ragged(),
        read_slots=jnp.full(1, 2, jnp.int32),
        write_slots=jnp.full(1, 2, jnp.int32),
    )
    expected, after = delta_rule_oracle(**tokens, state=np.zeros(SHAPE), scale=CASE.k_dim**-0.5)
    np.testing.assert_allclose(np.asarray(out, float), expected, rtol=0, atol=CASE.atol)
    stored = np.asarray(decode(state[2]).astype(jnp.float32), np.float64)
    assert (np.abs(stored - after) <= ULP * np.abs(after) + CASE.state_atol).all()
