"""Gated linear attention on NVIDIA GPUs, token by token: for what `triton_gpu` refuses."""

from typing import Any

import jax

from pallas_kernels import gpu_chip
from pallas_kernels.gla import gpu_recurrent
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts


def refuses(facts: Facts) -> str | None:
    """Why this kernel cannot run, or None."""
    return gpu_chip.refuses(facts) or gpu_chip.refuses_state(facts.values["state"].shape[2])


def gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    scale: float | None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.gla`. `interpret` is that of `pl.pallas_call`, for tests on CPU."""
    return gpu_recurrent.recurrent(
        (q, k, v, g), state, ragged, (read_slots, write_slots),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        prefill=not ragged.decode_only, interpret=interpret,
    )  # fmt: skip
