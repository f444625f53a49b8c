"""Rotary position embeddings (Su et al. 2021), channel i rotates with i + dim/2."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.specs import RopeSpec
from pallas_kernels.platform import current


def inverse_frequencies(spec: RopeSpec) -> tuple[np.ndarray, float]:
    """float32[dim / 2] angles per position, and the factor on cos and sin.

    The formulas are those of `rope_parameters` in config.json: `linear` (Chen et al. 2023),
    `llama3` (Llama 3.1's smooth interpolation by wavelength), `yarn` (Peng et al. 2023).
    """
    exponent = np.arange(0, spec.dim, 2, dtype=np.float32) / np.float32(spec.dim)
    freq = (1.0 / np.float32(spec.theta) ** exponent).astype(np.float32)
    if spec.kind == "default":
        return freq, 1.0
    if spec.kind == "linear":
        return freq / np.float32(spec.factor), 1.0
    if spec.kind == "llama3":
        return _llama3(freq, spec), 1.0
    return _yarn(freq, spec), spec.attention_factor


def _llama3(freq: np.ndarray, spec: RopeSpec) -> np.ndarray:
    wavelen = 2 * math.pi / freq
    smooth = (spec.original_max_position / wavelen - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1 - smooth) * freq / spec.factor + smooth * freq).astype(np.float32)


def _yarn(freq: np.ndarray, spec: RopeSpec) -> np.ndarray:
    def correction(rotations: float) -> float:
        length = spec.original_max_position / (rotations * 2 * math.pi)
        return spec.dim * math.log(length) / (2 * math.log(spec.theta))

    low, high = correction(spec.beta_fast), correction(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    span = max(high - low, 0.001)
    ramp = np.clip((np.arange(spec.dim // 2, dtype=np.float32) - low) / span, 0.0, 1.0)
    return (freq / spec.factor * ramp + freq * (1 - ramp)).astype(np.float32)


def cos_sin(positions: jax.Array, spec: RopeSpec) -> tuple[jax.Array, jax.Array]:
    """positions i32[T] -> cos and sin, each float32[T, dim / 2]."""
    freq, factor = inverse_frequencies(spec)

    def compute() -> tuple[jax.Array, jax.Array]:
        angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(freq)[None, :]
        return jnp.cos(angle) * factor, jnp.sin(angle) * factor

    if current().platform != "cpu":
        return compute()
    # XLA:CPU would fuse cos and sin into their users and compute them again in every layer for
    # every head. It drops optimization barriers, but not a branch that it cannot decide.
    nothing = jnp.zeros((positions.shape[0], freq.size), jnp.float32)
    return jax.lax.cond(positions[0] >= 0, compute, lambda: (nothing, nothing))


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first 2 * cos.shape[-1] channels of x [T, heads, H]; the rest passes through."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., 2 * half :]], axis=-1)
