"""Products with a weight matrix, and the embedding table."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.platform import current
from pallas_kernels.storage import decode, encode, storage_dtype

Axes = Sequence[str | None]


def param(
    rngs: nnx.Rngs, shape: Sequence[int], axes: Axes, dtype: jax.typing.DTypeLike
) -> nnx.Param:
    """A normally initialised parameter that carries its logical axis names, one per dimension."""
    return nnx.Param(
        nnx.initializers.normal(0.02)(rngs.params(), tuple(shape), dtype), axes=tuple(axes)
    )


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in] transposed, accumulated and returned in float32.

    Weights stay in the [out, in] layout of the checkpoints: no transpose at load, and XLA:CPU
    streams them fastest so. Asking for a float32 result matters: with a bfloat16 result XLA:CPU
    upcasts the whole weight first.
    """
    if x.shape[0] == 1 and x.dtype == jnp.bfloat16 and current().platform == "cpu":
        # XLA:CPU runs one-row bfloat16 products on one thread, and two-row products on all.
        return matmul(jnp.concatenate([x, jnp.zeros_like(x)]), weight)[:1]
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32)


class Linear(nnx.Module):
    """y = x W^T + b. `axes` are the logical names of (out, in)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: Axes,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        bias: bool = False,
    ) -> None:
        self.weight = param(rngs, (out_features, in_features), axes, dtype)
        self.bias = param(rngs, (out_features,), axes[:1], dtype) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out] in the dtype of x."""
        return self.float32(x).astype(x.dtype)

    def float32(self, x: jax.Array) -> jax.Array:
        """The same, without rounding the float32 result to the dtype of x."""
        y = matmul(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))
        return y


class Embedding(nnx.Module):
    """A table [vocab, embed], read by token id; tied heads multiply by it."""

    def __init__(
        self, vocab_size: int, features: int, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.weight = param(rngs, (vocab_size, features), ("vocab", "embed"), dtype)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """token_ids i32[...] -> [..., embed]."""
        weight = self.weight[...]
        return decode(encode(weight, storage_dtype(weight.dtype))[token_ids])

    def attend(self, x: jax.Array) -> jax.Array:
        """x [..., embed] -> float32 logits [..., vocab]."""
        return matmul(x, self.weight[...])
