"""The state after every token of a row, in slots of its own, for ops with state."""

import os

import jax.numpy as jnp
import numpy as np

from pallas_kernels import causal_conv1d, gated_delta_rule
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.recurrence import token_by_token

SEED = int(os.environ.get("HYBRID_JAX_TEST_SEED") or int.from_bytes(os.urandom(3)))
COUNT = 3  # tokens of each row
# Rows 0 and 1 have earlier tokens, and row 1 reads the slot it writes first; row 2 has none, and
# reads NaN; row 3 is padding.
BEFORE = (5, 9, 0)
READ = np.array([7, 4, 0, 0], np.int32)
WRITE = np.array([[1, 2, 3], [4, 5, 6], [8, 9, 10], [0, 0, 0]], np.int32)
BATCH = RaggedBatch(
    jnp.array([0, 3, 6, 9, 9], jnp.int32),
    jnp.array([5 + COUNT, 9 + COUNT, COUNT, 0], jnp.int32),
    jnp.array([0, 3], jnp.int32),
    decode_only=False,
)


def pool(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """12 slots: what rows 0 and 1 read, the rest NaN."""
    state = np.full((12, *shape), np.nan, np.float32)
    state[[7, 4]] = rng.normal(size=(2, *shape))
    return state


def test_gated_delta_rule() -> None:
    """Against the recurrence of each row by itself, up to each token."""
    rng = np.random.default_rng(SEED)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    tokens = (normal(12, 2, 4), normal(12, 2, 4), normal(12, 4, 8), -np.abs(normal(12, 4)))
    tokens = tuple(map(jnp.asarray, (*tokens, rng.uniform(size=(12, 4)).astype(np.float32))))
    state = pool(rng, 4, 4, 8)
    out, after = token_by_token(
        gated_delta_rule.gated_delta_rule, tokens, jnp.asarray(state), BATCH, READ, WRITE
    )
    for row in range(3):
        initial = state[READ[row]] if BEFORE[row] else np.zeros_like(state[0])
        for i in range(COUNT):
            part = [x[row * COUNT : row * COUNT + i + 1] for x in tokens]
            wanted, final = gated_delta_rule.recurrent(*part, jnp.asarray(initial))
            # Sums of 4 to 8 float32 products of order one, in another order.
            np.testing.assert_allclose(after[WRITE[row, i]], final, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(out[row * COUNT + i], wanted[i], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(after[7], state[7])  # read only
    assert np.isnan(np.asarray(after[11])).all()


def test_causal_conv1d() -> None:
    """The last inputs after each token are copies, so equal bit for bit."""
    rng = np.random.default_rng(SEED)
    x = rng.normal(size=(12, 6)).astype(np.float32)
    weight = rng.normal(size=(6, 4)).astype(np.float32)
    state = pool(rng, 3, 6)

    def op(x, state, *where):
        return causal_conv1d.causal_conv1d(x, jnp.asarray(weight), None, state, *where)

    y, after = token_by_token(op, (jnp.asarray(x),), jnp.asarray(state), BATCH, READ, WRITE)
    for row in range(3):
        earlier = state[READ[row]] if BEFORE[row] else np.zeros_like(state[0])
        inputs = np.concatenate([earlier, x[row * COUNT : (row + 1) * COUNT]])
        for i in range(COUNT):
            np.testing.assert_array_equal(after[WRITE[row, i]], inputs[i + 1 : i + 4])
            taps = inputs[i : i + 4].astype(np.float64)
            wanted = (taps * weight.T).sum(axis=0)
            # A float32 sum of 4 products.
            np.testing.assert_allclose(y[row * COUNT + i], wanted, rtol=1e-5, atol=1e-5)
