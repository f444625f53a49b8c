"""Mamba-2's recurrence on NVIDIA GPUs, token by token: for what `triton_gpu` refuses."""

from typing import Any

import jax

from pallas_kernels import gpu_chip
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts
from pallas_kernels.ssd import gpu_recurrent
from pallas_kernels.ssd.reference import F32, step_size


def refuses(facts: Facts) -> str | None:
    """Why this kernel cannot run, or None."""
    return gpu_chip.refuses(facts) or gpu_chip.refuses_state(facts.values["state"].shape[1])


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
    return gpu_recurrent.recurrent(
        x, dt, A, B, C, skip, state, ragged, (read_slots, write_slots),
        prefill=not ragged.decode_only, interpret=interpret,
    )  # fmt: skip
