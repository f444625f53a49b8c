"""The causal convolution on NVIDIA GPUs: which calls the Triton kernel takes."""

from typing import Any

import jax

from pallas_kernels import gpu_chip
from pallas_kernels.causal_conv1d import gpu_decode
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts


def refuses(facts: Facts) -> str | None:
    """Why this kernel cannot run, or None."""
    return gpu_chip.refuses(facts) or gpu_chip.refuses_prefill(facts)


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
    y, pool = gpu_decode.decode(
        x, weight, bias, pool, ragged, slots, activation=activation, interpret=interpret
    )
    return y, pool.reshape(state.shape)
