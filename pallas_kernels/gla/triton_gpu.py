"""Gated linear attention on NVIDIA GPUs: which calls the Triton kernels take."""

from typing import Any

import jax

from pallas_kernels import gpu_chip, gpu_chunks
from pallas_kernels.gla import gpu_prefill, gpu_recurrent
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts


def refuses(facts: Facts) -> str | None:
    """Why these kernels cannot run, or None."""
    state = facts.values["state"]
    reason = gpu_chip.refuses(facts) or gpu_chip.refuses_state(state.shape[2])
    if reason is not None or facts.values["decode_only"]:
        return reason
    return gpu_chunks.refuses(facts, "q", "k", "v", channels=state.shape[2])


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
    tokens, slots = (q, k, v, g), (read_slots, write_slots)
    options = {"scale": q.shape[-1] ** -0.5 if scale is None else scale, "interpret": interpret}
    out, state = gpu_recurrent.recurrent(tokens, state, ragged, slots, **options)
    if ragged.decode_only:
        return out, state
    return gpu_prefill.prefill(tokens, out, state, ragged, slots, **options)
