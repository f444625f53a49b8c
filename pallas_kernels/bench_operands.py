"""Random operands for the cases of every op, as a step of an engine would call it.

Values are of the size that models have, so that decays decay and states stay bounded.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.storage import encode, storage_dtype


@dataclass(frozen=True)
class Batch:
    """Rows that are all alike: decode rows if they have one new token each, else prefill rows."""

    rows: int
    earlier: int  # tokens of each row before the step
    new: int

    @property
    def tokens(self) -> int:
        """T."""
        return self.rows * self.new

    def ragged(self) -> RaggedBatch:
        """As the ops take it."""
        decode = self.new == 1
        return RaggedBatch(
            self.new * jnp.arange(self.rows + 1, dtype=jnp.int32),
            jnp.full(self.rows, self.earlier + self.new, jnp.int32),
            jnp.asarray((self.rows * decode, self.rows), jnp.int32),
            decode,
        )


class Call(NamedTuple):
    """`run(pool, **operands, implementation=...)` gives a result and the new pool."""

    run: Callable[..., tuple[Any, Any]]
    pool: Any  # state or states, pages or rows; updated in place if donated
    operands: dict[str, Any]


def cases_of(op: str) -> tuple[Any, ...]:
    """The cases of an op, in the order of its `cases.py`."""
    return importlib.import_module(f"pallas_kernels.{op}.cases").CASES


def make_call(op: str, case: Any, batch: Batch, seed: int = 0) -> Call:
    """The op on a case. Operands are drawn by `seed`."""
    return _make_call(op, case, batch, _Draw(np.random.default_rng(seed)))


def call_bytes(op: str, case: Any, batch: Batch) -> int:
    """Bytes of the pool and the operands of `make_call`, which are not made."""

    def arrays() -> tuple[jax.Array, dict[str, Any]]:
        call = _make_call(op, case, batch, _Zeros())
        return call.pool, call.operands

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(arrays)))


def _make_call(op: str, case: Any, batch: Batch, draw: "_Draw") -> Call:
    if op in _STATE_OPS:
        return _state_op(op, case, batch, draw)
    return _OTHER_OPS[op](case, batch, draw)


class _Draw:
    """Random arrays on the device."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def normal(self, dtype: str, *shape: int) -> jax.Array:
        """Of variance 1."""
        return jnp.asarray(self._rng.normal(size=shape), dtype)

    def unit(self, dtype: str, *shape: int) -> jax.Array:
        """Vectors [..., d] of length 1."""
        drawn = self._rng.normal(size=shape)
        return jnp.asarray(drawn / np.linalg.norm(drawn, axis=-1, keepdims=True), dtype)

    def between(self, low: float, high: float, *shape: int) -> jax.Array:
        """Uniform, float32."""
        return jnp.asarray(self._rng.uniform(low, high, size=shape), jnp.float32)

    def permutation(self, count: int) -> jax.Array:
        """The numbers below `count`, int32."""
        return jnp.asarray(self._rng.permutation(count), jnp.int32)

    def log_decay(self, *shape: int) -> jax.Array:
        """From none to nearly everything, as trained gates have. Float32."""
        return -jnp.exp(self.between(-7.0, 2.0, *shape))


class _Zeros(_Draw):
    """Arrays of the same shapes, to be traced: drawn numbers would be made at once."""

    def __init__(self) -> None:
        pass

    def normal(self, dtype: str, *shape: int) -> jax.Array:
        return jnp.zeros(shape, dtype)

    unit = normal

    def between(self, low: float, high: float, *shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.float32)

    def permutation(self, count: int) -> jax.Array:
        return jnp.zeros(count, jnp.int32)


def _state_op(op: str, case: Any, batch: Batch, draw: _Draw) -> Call:
    """An op with a pool of states; every row updates its slot in place."""
    operands, options, shape, dtype = _STATE_OPS[op](case, batch.tokens, draw)
    pool = encode(draw.normal("float32", batch.rows + 1, *shape), storage_dtype(dtype))
    slots = jnp.arange(1, batch.rows + 1, dtype=jnp.int32)
    function = getattr(importlib.import_module(f"pallas_kernels.{op}"), op)

    def run(pool: jax.Array, **given: Any) -> tuple[Any, jax.Array]:
        return function(state=pool, **given, **options)

    rows = {"ragged": batch.ragged(), "read_slots": slots, "write_slots": slots}
    return Call(run, pool, operands | rows)


# (operands by name, static options, shape of a state, dtype of its values)
_StateOperands = tuple[dict[str, Any], dict[str, Any], tuple[int, ...], str]


def _causal_conv1d(case: Any, tokens: int, draw: _Draw) -> _StateOperands:
    operands = {
        "x": draw.normal(case.dtype, tokens, case.channels),
        "weight": draw.normal(case.dtype, case.channels, case.width),
        "bias": draw.normal(case.dtype, case.channels) if case.bias else None,
    }
    return operands, {"activation": case.activation}, (case.width - 1, case.channels), case.dtype


def _gated_delta_rule(case: Any, tokens: int, draw: _Draw) -> _StateOperands:
    keys, values = (case.num_k_heads, case.k_dim), (case.num_v_heads, case.v_dim)
    decays = (case.num_v_heads, case.k_dim) if case.per_channel else (case.num_v_heads,)
    operands = {
        "q": draw.normal(case.dtype, tokens, *keys),
        "k": draw.normal(case.dtype, tokens, *keys),
        "v": draw.normal(case.dtype, tokens, *values),
        "g": draw.log_decay(tokens, *decays),
        "beta": draw.between(0.0, case.max_beta, tokens, case.num_v_heads),
    }
    return operands, {}, (case.num_v_heads, case.k_dim, case.v_dim), "float32"


def _gla(case: Any, tokens: int, draw: _Draw) -> _StateOperands:
    keys, values = (case.num_k_heads, case.k_dim), (case.num_v_heads, case.v_dim)
    decays = (case.num_v_heads, case.k_dim) if case.per_channel else (case.num_v_heads,)
    operands = {
        "q": draw.unit(case.dtype, tokens, *keys),
        "k": draw.unit(case.dtype, tokens, *keys),
        "v": draw.normal(case.dtype, tokens, *values),
        "g": draw.log_decay(tokens, *decays),
    }
    return operands, {}, (case.num_v_heads, case.k_dim, case.v_dim), "float32"


def _ssd(case: Any, tokens: int, draw: _Draw) -> _StateOperands:
    weights = (tokens, case.groups, case.state_size)
    operands = {
        "x": draw.normal(case.dtype, tokens, case.heads, case.head_dim),
        "dt": draw.normal(case.dtype, tokens, case.heads),
        "A": -draw.between(1.0, 16.0, case.heads),
        "B": draw.unit(case.dtype, *weights),
        "C": draw.unit(case.dtype, *weights),
        "D": draw.normal("float32", case.heads),
        "dt_bias": draw.between(-6.0, 1.0, case.heads),
    }
    shape = (case.state_size, case.heads * case.head_dim)
    return operands, {"dt_limit": case.dt_limit}, shape, "float32"


def _rwkv7(case: Any, tokens: int, draw: _Draw) -> _StateOperands:
    keys = (tokens, case.heads, case.k_dim)
    kappa = draw.unit("float32", *keys)
    operands = {
        "r": draw.unit(case.dtype, *keys),
        "w": draw.log_decay(*keys),
        "k": draw.unit(case.dtype, *keys),
        "v": draw.normal(case.dtype, tokens, case.heads, case.v_dim),
        "a": (-kappa).astype(case.dtype),
        "b": (kappa * draw.between(0.0, 1.0, *keys)).astype(case.dtype),
    }
    return operands, {}, (case.k_dim, case.heads * case.v_dim), "float32"


def _selective_scan(case: Any, tokens: int, draw: _Draw) -> _StateOperands:
    operands = {
        "x": draw.normal(case.dtype, tokens, case.channels),
        "dt": draw.normal(case.dtype, tokens, case.channels),
        "A": -draw.between(1.0, 16.0, case.state_size, case.channels),
        "B": draw.unit(case.dtype, tokens, case.state_size),
        "C": draw.unit(case.dtype, tokens, case.state_size),
        "D": draw.normal("float32", case.channels),
        "dt_bias": draw.between(-6.0, 1.0, case.channels),
    }
    return operands, {}, (case.state_size, case.channels), "float32"


_STATE_OPS: dict[str, Callable[[Any, int, _Draw], _StateOperands]] = {
    "causal_conv1d": _causal_conv1d,
    "gated_delta_rule": _gated_delta_rule,
    "gla": _gla,
    "rwkv7": _rwkv7,
    "selective_scan": _selective_scan,
    "ssd": _ssd,
}


def _gated_delta_net(case: Any, batch: Batch, draw: _Draw) -> Call:
    """Two pools; every row updates its slot of both in place."""
    from pallas_kernels.causal_conv1d import state_shape
    from pallas_kernels.gated_delta_net import States, Weights, gated_delta_net

    slots, heads, dtype = batch.rows + 1, case.num_v_heads, case.dtype
    decays = (heads, case.k_dim)[: 1 + case.per_channel]
    conv = draw.normal(dtype, *state_shape(slots, case.width - 1, case.channels))
    recurrent = draw.normal("float32", slots, heads, case.k_dim, case.v_dim)
    rows = jnp.arange(1, slots, dtype=jnp.int32)
    operands = {
        "qkv": draw.normal(dtype, batch.tokens, case.channels),
        "a": draw.normal(dtype, batch.tokens, *decays),
        "b": draw.normal(dtype, batch.tokens, heads),
        "ragged": batch.ragged(),
        "read_slots": rows,
        "write_slots": rows,
        "weights": Weights(
            draw.normal(dtype, case.channels, case.width),
            draw.normal(dtype, case.channels) if case.bias else None,
            draw.between(-2.0, 2.8, heads),
            draw.between(-7.0, 1.0, *decays),
        ),
    }
    options = {"k_heads": case.num_k_heads, "allow_neg_eigval": case.allow_neg_eigval}

    def run(pool: States, **given: Any) -> tuple[Any, States]:
        return gated_delta_net(state=pool, **given, **options)

    return Call(run, States(encode(conv, storage_dtype(dtype)), recurrent), operands)


def _mamba2(case: Any, batch: Batch, draw: _Draw) -> Call:
    """Two pools; every row updates its slot of both in place."""
    from pallas_kernels.causal_conv1d import state_shape
    from pallas_kernels.mamba2 import States, Weights, mamba2

    slots, dtype, inner = batch.rows + 1, case.dtype, case.heads * case.head_dim
    conv = draw.normal(dtype, *state_shape(slots, case.width - 1, case.channels))
    recurrent = draw.normal("float32", slots, case.state_size, inner)
    rows = jnp.arange(1, slots, dtype=jnp.int32)
    # So that B and C are about of length 1.
    weight = draw.normal("float32", case.channels, case.width).at[inner:].mul(case.state_size**-0.5)
    operands = {
        "xBC": draw.normal(dtype, batch.tokens, case.channels),
        "dt": draw.normal(dtype, batch.tokens, case.heads),
        "ragged": batch.ragged(),
        "read_slots": rows,
        "write_slots": rows,
        "weights": Weights(
            weight.astype(dtype),
            jnp.zeros(case.channels, dtype) if case.bias else None,
            draw.between(0.0, 2.8, case.heads),
            draw.normal("float32", case.heads),
            draw.between(-6.0, 1.0, case.heads),
        ),
    }

    def run(pool: States, **given: Any) -> tuple[Any, States]:
        return mamba2(state=pool, dt_limit=case.dt_limit, **given)

    return Call(run, States(encode(conv, storage_dtype(dtype)), recurrent), operands)


def _paged_attention(case: Any, batch: Batch, draw: _Draw) -> Call:
    """Pages of a row lie anywhere in the pool, as they do when sequences come and go. With a window
    they are a ring.
    """
    from pallas_kernels.paged_attention import paged_attention, pages_shape

    width = -(-(batch.earlier + batch.new) // case.page_size)
    if case.window is not None:
        width = min(width, -(-(case.window - 1 + batch.new) // case.page_size) + 1)
    shape = pages_shape(batch.rows * width + 1, case.page_size, case.num_kv_heads, case.head_dim)
    pool = encode(draw.normal("float32", *shape), storage_dtype(case.pages_dtype or case.dtype))
    scales = None if case.pages_dtype is None else draw.between(0.5, 1.0, case.num_kv_heads)
    ids = draw.permutation(batch.rows * width) + 1
    heads = (batch.tokens, case.num_kv_heads, case.head_dim)
    operands = {
        "q": draw.normal(case.dtype, batch.tokens, case.num_heads, case.head_dim),
        "k": draw.normal(case.dtype, *heads),
        "v": draw.normal(case.dtype, *heads),
        "table": ids.reshape(batch.rows, width),
        "ragged": batch.ragged(),
        "sinks": draw.normal("float32", case.num_heads) if case.sinks else None,
        "k_scale": scales,
        "v_scale": scales,
    }
    options = {"scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap}

    def run(pool: jax.Array, **given: Any) -> tuple[Any, jax.Array]:
        return paged_attention(pages=pool, **given, **options)

    return Call(run, pool, operands)


def _rows(case: Any, batch: Batch, draw: _Draw) -> Call:
    """Copies as many rows of the pool as the batch has, at most half of them."""
    from pallas_kernels.rows import copy_rows

    count = batch.rows
    values = draw.normal("float32", *case.shape)
    rows = jnp.arange(1, 2 * count + 1, dtype=jnp.int32)

    def run(pool: jax.Array, **given: Any) -> tuple[Any, jax.Array]:
        return None, copy_rows(pool, **given)

    pool = (100 * values).astype(case.dtype)
    return Call(run, pool, {"sources": rows[:count], "targets": rows[count:]})


_OTHER_OPS: dict[str, Callable[[Any, Batch, _Draw], Call]] = {
    "gated_delta_net": _gated_delta_net,
    "mamba2": _mamba2,
    "paged_attention": _paged_attention,
    "rows": _rows,
}
OPS = (*_STATE_OPS, *_OTHER_OPS)
