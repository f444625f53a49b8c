"""The Mamba-2 mixer on TPU: decode rows in one kernel that moves every state once, in place."""

from typing import Any

import jax

from pallas_kernels import tpu_chip
from pallas_kernels.mamba2 import tpu_decode
from pallas_kernels.mamba2.operands import States, Weights
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts
from pallas_kernels.ssd.mosaic_tpu import refuses_heads
from pallas_kernels.tpu_chip import Chip


def mamba2(
    xBC: jax.Array,
    dt: jax.Array,
    state: States,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    weights: Weights,
    dt_limit: tuple[float, float],
    interpret: Any = False,
) -> tuple[jax.Array, States]:
    """See `api.mamba2`. `interpret` is that of `pl.pallas_call`, for tests on CPU."""
    return tpu_decode.decode(
        xBC, dt, state, ragged, (read_slots, write_slots),
        weights=weights, dt_limit=dt_limit, vmem=tpu_chip.current().vmem, interpret=interpret,
    )  # fmt: skip


def refuses(facts: Facts) -> str | None:
    """Why this kernel cannot run, or None."""
    if not facts.values["decode_only"]:
        return "leaves batches with prefill rows to the separate ops"
    reason = tpu_chip.refuses(facts) or tpu_chip.refuses_dtypes(facts, "xBC", "dt")
    if reason is not None:
        return reason
    chip = tpu_chip.CHIPS[facts.device_kind]
    if chip.cores > 1:
        return f"runs on one core; the separate op of the recurrence uses all {chip.cores}"
    xBC, dt, state = (facts.values[name] for name in ("xBC", "dt", "state"))
    heads, (_, size, inner) = dt.shape[1], state.shape
    channels = xBC.shape[1]
    reason = refuses_heads(heads, inner // heads, (channels - inner) // (2 * size), size)
    if reason is None and not fits_decode(channels, inner, size, chip):
        reason = f"{facts.device_kind}'s VMEM is too small for a row's states of {size} x {inner}"
    return reason


def fits_decode(channels: int, inner: int, size: int, chip: Chip) -> bool:
    """Whether VMEM has room for the four states of decode's pipeline, f32[N, H * P] each.

    Everything else is at most 640 bytes per channel.
    """
    return 4 * 4 * size * inner + 640 * channels <= chip.vmem_limit
