"""Causal convolution in plain JAX: the definition of correct, and the path on CPU.

Letters: T tokens, S rows, C channels, W convolution width.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import storage
from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32


def dense(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, activation: str | None = None
) -> jax.Array:
    """One whole sequence, zeros before its start. Differentiable; batch it with `jax.vmap`.

    Args:
        x: [T, C] inputs.
        weight: [C, W]; the last tap multiplies the current token.
        bias: [C] or None.
        activation: "silu" or None.

    Returns:
        y [T, C] in the dtype of x, summed in float32.
    """
    num_tokens, width = x.shape[0], weight.shape[1]
    padded = jnp.pad(x, ((width - 1, 0), (0, 0)))
    taps = [padded[j : j + num_tokens] for j in range(width)]
    return weighted_sum(taps, weight, bias, activation).astype(x.dtype)


def weighted_sum(
    taps: list[jax.Array], weight: jax.Array, bias: jax.Array | None, activation: str | None
) -> jax.Array:
    """f32[T, C] from W shifted inputs [T, C], oldest first."""
    total = jnp.zeros(taps[0].shape, F32)
    for j, tap in enumerate(taps):
        total = total + tap.astype(F32) * weight[None, :, j].astype(F32)
    if bias is not None:
        total = total + bias.astype(F32)[None]
    return jax.nn.silu(total) if activation == "silu" else total


def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    activation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.causal_conv1d`.

    Decode and prefill are the same sum over a row's inputs, so one path serves both.
    """
    keep = state.shape[1]
    earlier = storage.decode(state[read_slots]).reshape(-1, keep, x.shape[1])
    # Selected, not multiplied: the slot of a row without earlier tokens may hold NaN.
    earlier = jnp.where(ragged.has_state[:, None, None], earlier, jnp.zeros_like(earlier))
    taps = _decode_taps(x, earlier) if ragged.decode_only else _mixed_taps(x, earlier, ragged)
    y = weighted_sum(taps, weight, bias, activation).astype(x.dtype)
    y = jnp.where(ragged.token_valid(x.shape[0])[:, None], y, jnp.zeros_like(y))
    # The last W - 1 of [earlier, tokens]: entries len, ..., len + W - 2.
    index = ragged.query_lens[:, None] + jnp.arange(keep, dtype=jnp.int32)[None]
    token = jnp.maximum(ragged.query_start_loc[:-1, None] + index - keep, 0)
    from_x = storage.encode(x.at[token].get(mode="clip"), state.dtype)
    from_state = jnp.take_along_axis(earlier, index[:, :, None], axis=1, mode="clip")
    last = jnp.where((index >= keep)[:, :, None], from_x, storage.encode(from_state, state.dtype))
    # Padding rows write nothing: their slot is moved out of range.
    slots = jnp.where(ragged.row_valid, write_slots, state.shape[0])
    last = last.reshape(-1, *state.shape[1:])
    return y, state.at[slots].set(last, mode="drop")


def _decode_taps(x: jax.Array, earlier: jax.Array) -> list[jax.Array]:
    return [*(earlier[:, j] for j in range(earlier.shape[1])), x]


def _mixed_taps(x: jax.Array, earlier: jax.Array, ragged: RaggedBatch) -> list[jax.Array]:
    """Shifts of the flat axis; where a shift leaves the row, the row's state is scattered in."""
    num_tokens, keep = x.shape[0], earlier.shape[1]
    start, lens = ragged.query_start_loc[:-1], ragged.query_lens
    padded = jnp.pad(x, ((keep, 0), (0, 0)))
    taps = []
    for j in range(keep):
        # Token i of a row (i < keep - j) takes state entry i + j instead of a token of another row.
        i = jnp.arange(keep - j, dtype=jnp.int32)[None]
        target = jnp.where(i < lens[:, None], start[:, None] + i, num_tokens)
        shifted = padded[j : j + num_tokens]
        taps.append(shifted.at[target].set(earlier[:, j:].astype(x.dtype), mode="drop"))
    return [*taps, x]
