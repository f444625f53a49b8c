"""Runs an op with a pool of states on a ragged batch and compares every slot with an oracle."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import storage
from pallas_kernels.causal_conv1d import state_shape
from tests.helpers.ragged import Rows

# What a batch with prefill rows may look like, all in one bucket: a bucket compiles once.
MIXED_BATCHES = {
    name: rows.padded(9, 330)
    for name, rows in {
        "one_token_prompts": Rows(prefill=((0, 1), (0, 1), (4, 1))),
        "chunk_and_neighbours": Rows(decode=(3, 0), prefill=((0, 63), (2, 64), (0, 65), (9, 1))),
        "long_prefill": Rows(prefill=((0, 193), (64, 130))),
        "decode_in_a_mixed_bucket": Rows(decode=(0, 1, 5)),
        "padding": Rows(),
    }.items()
}
DECODE_BATCHES = {
    name: rows.padded(7, 7)
    for name, rows in {
        "mixed_ages": Rows(decode=(0, 1, 5, 100)),
        "full": Rows(decode=(1, 0, 2, 0, 0, 3, 4)),
        "padding": Rows(),
    }.items()
}
BATCHES = {
    **{f"decode-{name}": rows for name, rows in DECODE_BATCHES.items()},
    **{f"mixed-{name}": rows for name, rows in MIXED_BATCHES.items()},
}

Oracle = Callable[..., tuple[np.ndarray, ...]]
Op = Callable[..., tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Tokens:
    """Operands of a batch in float64, each as its dtype has rounded it, and what an op makes of
    them.
    """

    arrays: Mapping[str, np.ndarray]  # [T, ...]
    dtypes: Mapping[str, str]
    oracle: Oracle  # (state, **arrays of one row) -> (out, state), in float64
    state_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    out_dtype: str

    def on_device(self) -> dict[str, jax.Array]:
        """The operands as the op takes them."""
        return {name: jnp.asarray(x, self.dtypes[name]) for name, x in self.arrays.items()}

    def with_padding(self, rows: Rows) -> dict[str, np.ndarray]:
        """The operands, NaN for what is no token of `rows`."""
        arrays = {name: x.copy() for name, x in self.arrays.items()}
        for array in arrays.values():
            array[sum(query for _, query in rows.all) :] = np.nan
        return arrays


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """What is left of `values` in `dtype`, as float64."""
    return np.asarray(jnp.asarray(values, dtype), np.float64)


def unit(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random vectors [..., d] of length 1."""
    drawn = rng.normal(size=shape)
    return drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)


def log_decay(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Log decays from none to nearly everything, as trained gates have."""
    return -np.exp(rng.uniform(-7, 2, size=shape))


def check(
    op: Op,
    tokens: Tokens,
    rows: Rows,
    *,
    atol: float,
    state_atol: float,
    seed: int = 0,
    shared: bool = False,
) -> None:
    """Out and every slot, the null slot included. `shared`: all rows read the same slot.

    Everything that must not be read is NaN: padding tokens, free slots, and the slots of rows
    without earlier tokens.
    """
    rng = np.random.default_rng(seed)
    arrays = tokens.with_padding(rows)
    slots, read, write = slots_of(rows, rng, shared)
    before = np.full((slots, *tokens.state_shape), np.nan)
    for row, (earlier, _) in enumerate(rows.all):
        if earlier:
            before[read[row]] = rng.normal(size=tokens.state_shape).astype(np.float32)
    expected, after = np.zeros((rows.num_tokens, *tokens.out_shape)), before.copy()
    for row, (earlier, _) in enumerate(rows.all):
        part = {name: x[rows.slices[row]] for name, x in arrays.items()}
        state = before[read[row]] if earlier else np.zeros(tokens.state_shape)
        expected[rows.slices[row]], after[write[row]] = tokens.oracle(**part, state=state)
    read[len(rows.all) :] = write[len(rows.all) :] = 0
    out, state = op(
        **{name: jnp.asarray(x, tokens.dtypes[name]) for name, x in arrays.items()},
        state=jnp.asarray(before, jnp.float32),
        ragged=rows.ragged(),
        read_slots=jnp.asarray(read, jnp.int32),
        write_slots=jnp.asarray(write, jnp.int32),
    )
    assert out.dtype == jnp.dtype(tokens.out_dtype)
    np.testing.assert_allclose(np.asarray(out, float), expected, rtol=0, atol=atol)
    check_states(state, before, after, write[: len(rows.all)], state_atol)


def check_convolved(
    op: Callable[..., tuple[jax.Array, Any]],
    tokens: Tokens,
    rows: Rows,
    inputs_shape: tuple[int, int],
    states: Callable[[jax.Array, jax.Array], Any],
    *,
    atol: float,
    state_atol: float,
    seed: int = 0,
    shared: bool = False,
) -> None:
    """The same of an op with two pools: `states` of the last inputs of a convolution, [W - 1, C] of
    a row, and of the recurrence. The oracle takes and gives them as conv and recurrent.
    """
    rng = np.random.default_rng(seed)
    arrays = tokens.with_padding(rows)
    slots, read, write = slots_of(rows, rng, shared)
    conv = np.full((slots, *inputs_shape), np.nan)
    recurrent = np.full((slots, *tokens.state_shape), np.nan)
    for row, (earlier, _) in enumerate(rows.all):
        if earlier:
            inputs = rounded(rng.normal(size=inputs_shape), tokens.out_dtype)
            inputs[: max(len(inputs) - earlier, 0)] = 0
            conv[read[row]] = inputs
            recurrent[read[row]] = rng.normal(size=tokens.state_shape).astype(np.float32)
    expected = np.zeros((rows.num_tokens, *tokens.out_shape))
    after = conv.copy(), recurrent.copy()
    for row, (earlier, _) in enumerate(rows.all):
        part = {name: x[rows.slices[row]] for name, x in arrays.items()}
        before = [x[read[row]] if earlier else np.zeros(x.shape[1:]) for x in (conv, recurrent)]
        out, *new = tokens.oracle(**part, conv=before[0], recurrent=before[1])
        expected[rows.slices[row]] = out
        for pool, value in zip(after, new, strict=True):
            pool[write[row]] = value
    read[len(rows.all) :] = write[len(rows.all) :] = 0
    dtype = tokens.out_dtype
    stored = storage.encode(jnp.asarray(conv, dtype), storage.storage_dtype(dtype))
    out, new = op(
        **{name: jnp.asarray(x, tokens.dtypes[name]) for name, x in arrays.items()},
        state=states(
            stored.reshape(state_shape(slots, *inputs_shape)), jnp.asarray(recurrent, jnp.float32)
        ),
        ragged=rows.ragged(),
        read_slots=jnp.asarray(read, jnp.int32),
        write_slots=jnp.asarray(write, jnp.int32),
    )
    assert out.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(np.asarray(out, float), expected, rtol=0, atol=atol)
    inputs = np.asarray(storage.decode(new.conv), float).reshape(conv.shape)
    np.testing.assert_array_equal(inputs[1:], after[0][1:])
    check_states(new.recurrent, recurrent, after[1], write[: len(rows.all)], state_atol)


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


def check_states(
    state: jax.Array, before: np.ndarray, after: np.ndarray, written: np.ndarray, atol: float
) -> None:
    """Every slot of a pool; those that are not `written` hold what they held, bit for bit."""
    actual = np.asarray(state, float)
    np.testing.assert_allclose(actual, after, rtol=0, atol=atol)
    untouched = [slot for slot in range(len(before)) if slot not in written]
    np.testing.assert_array_equal(actual[untouched], before[untouched])
