"""Mamba-1's scan on NVIDIA GPUs: which calls the Triton kernel takes.

The step sizes come from XLA, which fuses them with what makes them.
"""

from typing import Any

import jax

from pallas_kernels import gpu_chip
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts
from pallas_kernels.selective_scan import gpu_recurrent, reference


def refuses(facts: Facts) -> str | None:
    """Why this kernel cannot run, or None."""
    return gpu_chip.refuses(facts) or gpu_chip.refuses_state(facts.values["state"].shape[1])


def selective_scan(
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
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.selective_scan`. `interpret` is that of `pl.pallas_call`, for tests on CPU."""
    step, skip = reference.step_size(dt, dt_bias), reference.skip(D, x)
    return gpu_recurrent.recurrent(
        x, step, B, C, A, skip, state, ragged, (read_slots, write_slots),
        prefill=not ragged.decode_only, interpret=interpret,
    )  # fmt: skip
