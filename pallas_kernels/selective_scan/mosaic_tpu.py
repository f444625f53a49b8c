"""Mamba-1's scan on TPU: a Pallas kernel that moves every state once, from slot to slot.

Decode rows go through `tpu_decode`, in mixed batches too; prefill rows through the reference. What
is elementwise in x and dt comes from XLA, which fuses it with what makes them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tpu_chip, tpu_rows
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import ArrayFacts, Facts
from pallas_kernels.selective_scan import reference, tpu_decode
from pallas_kernels.tpu_chip import LANES, SUBLANES, Chip


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
    chip, rows = tpu_chip.current(), ragged.num_rows_padded
    lanes = decode_lanes(state, chip)
    assert lanes is not None, "`refuses` has the reason"
    tokens = reference.prepare(x[:rows], dt[:rows], B[:rows], C[:rows], dt_bias)
    out, state = tpu_decode.decode(
        tokens, A, state, ragged, (read_slots, write_slots), lanes=lanes,
        vmem_limit=chip.vmem_limit, interpret=interpret,
    )  # fmt: skip
    # Selected, since padding tokens may hold anything.
    x0 = jnp.where(ragged.row_valid[:, None], tokens[0], 0.0)
    y = (out + reference.skip(D, x)[None] * x0).astype(x.dtype)
    if ragged.decode_only:
        return y, state
    rest, state = reference.selective_scan(
        x, dt, A, B, C, D, dt_bias, state, ragged, read_slots, write_slots, decode=False
    )
    return tpu_rows.merge(y, rest, ragged), state


def refuses(facts: Facts) -> str | None:
    """Why this kernel cannot run, or None."""
    reason = tpu_chip.refuses(facts)
    if reason is not None:
        return reason
    state = facts.values["state"]
    size, channels = state.shape[1:]
    if size % SUBLANES or channels % LANES:
        return (
            f"state size must be a multiple of {SUBLANES} and channels one of {LANES}, "
            f"not {size} and {channels}"
        )
    if decode_lanes(state, tpu_chip.CHIPS[facts.device_kind]) is None:
        return f"{facts.device_kind}'s VMEM is too small for a state of {size} x {LANES} channels"
    return None


def decode_lanes(state: jax.Array | ArrayFacts, chip: Chip) -> int | None:
    """Channels per grid step of decode, for state [slots, N, E]."""
    _, size, channels = state.shape
    vectors = channels // LANES
    block = tpu_chip.decode_heads("selective_scan", vectors, vectors, 4 * size * LANES, chip)
    return None if block is None else block * LANES
