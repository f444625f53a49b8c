"""The causal convolution on NVIDIA GPUs: which calls the Triton kernels take."""

from typing import Any

import jax

from pallas_kernels import gpu_chip
from pallas_kernels.causal_conv1d import gpu_decode, gpu_prefill
from pallas_kernels.ragged import RaggedBatch

refuses = gpu_chip.refuses


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
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.causal_conv1d`. `interpret` is that of `pl.pallas_call`, for tests on CPU."""
    slots = read_slots, write_slots
    pool = state.reshape(*state.shape[:2], -1)
    options = {"activation": activation, "interpret": interpret}
    y, pool = gpu_decode.decode(x, weight, bias, pool, ragged, slots, **options)
    if not ragged.decode_only:
        y, pool = gpu_prefill.prefill(x, weight, bias, y, pool, ragged, slots, **options)
    return y, pool.reshape(state.shape)
