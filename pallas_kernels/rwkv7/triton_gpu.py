"""RWKV-7's recurrence on NVIDIA GPUs: which calls the Triton kernel takes."""

from typing import Any

import jax

from pallas_kernels import gpu_chip
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts
from pallas_kernels.rwkv7 import gpu_recurrent


def refuses(facts: Facts) -> str | None:
    """Why this kernel cannot run, or None."""
    return gpu_chip.refuses(facts) or gpu_chip.refuses_state(facts.values["state"].shape[1])


def rwkv7(
    r: jax.Array,
    w: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.rwkv7`. `interpret` is that of `pl.pallas_call`, for tests on CPU."""
    return gpu_recurrent.recurrent(
        (r, w, k, v, a, b), state, ragged, (read_slots, write_slots),
        prefill=not ragged.decode_only, interpret=interpret,
    )  # fmt: skip
