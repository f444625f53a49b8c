"""Mamba-2's recurrence on NVIDIA GPUs: which calls the Triton kernel takes.

The step sizes, one per head, come from XLA.
"""

from typing import Any

import jax

from pallas_kernels import gpu_chip
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts
from pallas_kernels.ssd import gpu_decode
from pallas_kernels.ssd.reference import F32, step_size


def refuses(facts: Facts) -> str | None:
    """Why this kernel cannot run, or None."""
    return (
        gpu_chip.refuses(facts)
        or gpu_chip.refuses_prefill(facts)
        or gpu_chip.refuses_state(facts.values["state"].shape[1])
    )


def ssd(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None,
    dt_bias: jax.Array | None,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    dt_limit: tuple[float, float],
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.ssd`. `interpret` is that of `pl.pallas_call`, for tests on CPU."""
    dt, skip = step_size(dt, dt_bias, dt_limit), None if D is None else D.astype(F32)
    slots = read_slots, write_slots
    return gpu_decode.decode(x, dt, A, B, C, skip, state, ragged, slots, interpret=interpret)
