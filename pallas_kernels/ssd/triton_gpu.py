"""Mamba-2's recurrence on NVIDIA GPUs: which calls the Triton kernels take.

The step sizes, one per head, come from XLA.
"""

from typing import Any

import jax

from pallas_kernels import gpu_chip, gpu_chunks
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts
from pallas_kernels.ssd import gpu_prefill, gpu_recurrent
from pallas_kernels.ssd.reference import F32, step_size


def refuses(facts: Facts) -> str | None:
    """Why these kernels cannot run, or None."""
    channels = facts.values["state"].shape[1]
    reason = gpu_chip.refuses(facts) or gpu_chip.refuses_state(channels)
    if reason is not None or facts.values["decode_only"]:
        return reason
    return gpu_chunks.refuses(facts, "x", "B", "C", channels=channels)


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
    tokens, slots = (x, dt, A, B, C, skip), (read_slots, write_slots)
    y, state = gpu_recurrent.recurrent(*tokens, state, ragged, slots, interpret=interpret)
    if ragged.decode_only:
        return y, state
    return gpu_prefill.prefill(*tokens, y, state, ragged, slots, interpret=interpret)
