"""The gated delta rule on NVIDIA GPUs, token by token: for what `triton_gpu` refuses."""

from typing import Any

import jax

from pallas_kernels import gpu_chip
from pallas_kernels.gated_delta_rule import gpu_recurrent
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts


def refuses(facts: Facts) -> str | None:
    """Why this kernel cannot run, or None."""
    return gpu_chip.refuses(facts) or gpu_chip.refuses_state(facts.values["state"].shape[2])


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    scale: float | None,
    l2norm: bool,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.gated_delta_rule`. `interpret` is that of `pl.pallas_call`, for tests on CPU."""
    return gpu_recurrent.recurrent(
        (q, k, v, g, beta), state, ragged, (read_slots, write_slots),
        scale=q.shape[-1] ** -0.5 if scale is None else scale, l2norm=l2norm,
        prefill=not ragged.decode_only, interpret=interpret,
    )  # fmt: skip
