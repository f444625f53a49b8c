"""The causal convolution on TPU: Pallas kernels that move inputs, outputs and tails once.

Decode rows go through `tpu_decode`, prefill rows through `tpu_prefill`; a mixed batch runs both.
Tails stay in the pool, which is updated in place when the surrounding jit donates it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import storage, tpu_chip, tpu_rows
from pallas_kernels.causal_conv1d import tpu_decode, tpu_prefill, tpu_window
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts
from pallas_kernels.tpu_chip import LANES
from pallas_kernels.tpu_rows import CHUNK, ROWS

BLOCK = 2048  # channels per grid step of prefill, if they divide the channels


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
    slots, rows = (read_slots, write_slots), ragged.num_rows_padded
    taps = tpu_window.taps_of(weight, bias)
    options = {
        "activation": activation,
        "vmem_limit": tpu_chip.current().vmem_limit,
        "interpret": interpret,
    }
    first = x if ragged.decode_only else x[:rows]
    y, state = tpu_decode.decode(first, taps, state, ragged, slots, **options)
    if ragged.decode_only:
        return y, state
    lanes = prefill_lanes(x.shape[1])
    rest, state = tpu_prefill.prefill(x, taps, state, ragged, slots, lanes=lanes, **options)
    return tpu_rows.merge(y, rest, ragged), state


def refuses(facts: Facts) -> str | None:
    """Why these kernels cannot run, or None."""
    reason = tpu_chip.refuses(facts) or tpu_chip.refuses_dtypes(facts, "x", "weight")
    if reason is not None:
        return reason
    x, state = facts.values["x"], facts.values["state"]
    _, channels = x.shape
    width = state.shape[1] + 1
    if channels % LANES or state.shape[2:] != (channels // LANES, LANES):
        return f"state must be [slots, W - 1, C / {LANES}, {LANES}], not {state.shape}"
    if storage.value_dtype(state.dtype) != x.dtype:
        return f"keeps inputs as they are, in {x.dtype}, not in {state.dtype}"
    if width > tpu_window.MOST_TAPS:
        return f"takes at most {tpu_window.MOST_TAPS} taps, not {width}"
    lanes, itemsize = prefill_lanes(channels), jnp.dtype(x.dtype).itemsize
    prefill = CHUNK * lanes * (4 * itemsize + 2 * 4)
    decode = ROWS * channels * (itemsize * (width + 3) + 2 * 4)
    chip = tpu_chip.CHIPS[facts.device_kind]
    if max(prefill, decode) > chip.vmem_limit:
        return f"{facts.device_kind}'s VMEM is too small for {channels} channels"
    return None


def prefill_lanes(channels: int) -> int:
    """Channels per grid step of prefill."""
    return channels if channels % BLOCK else BLOCK
