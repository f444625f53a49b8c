"""Decode on TPU: one token per row, one transfer of each state in and one out.

Rows are computed on the vector units in float32: channels lie along the lanes, so that x, dt and y
are rows, B and C are columns, and a sum over N goes over whole vectors.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tpu_rows
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_chip import LANES
from pallas_kernels.tpu_rows import Slots


def decode(
    tokens: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    A: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    lanes: int,
    vmem_limit: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Decode rows of a batch; other rows touch no slot.

    Args:
        tokens: x, dt [S, E], B, C [S, N] of the first S tokens, float32; dt are step sizes.
        A: f32[N, E].
        state: f32[slots, N, E].
        ragged: row boundaries.
        slots: the slots to read and to write, i32[S] each.
        lanes: channels per grid step.
        vmem_limit: bytes of VMEM that the kernel may use.
        interpret: as for `pl.pallas_call`.

    Returns:
        y f32[S, E] without the skip, 0 for rows that do not decode, and the new `state`.
    """
    x, dt, B, C = tokens
    columns = jnp.stack([B, C], axis=2)[None]  # [1, S, N, 2]
    return tpu_rows.decode(
        _row, [dt, dt * x], columns, [A], state, ragged, slots, name="selective_scan_decode",
        lanes=lanes, vmem_limit=vmem_limit, interpret=interpret,
    )  # fmt: skip


def _row(from_zeros: jax.Array, dt, written, columns, A, before, y, after) -> None:
    """One row, for one block of channels.

    VMEM, all float32: dt, written, y [1, 1, E']; columns [1, 1, N, 2]; A [N, E']; before, after
    [1, N, E'].
    """
    _, size, lanes = before.shape
    b, c = (jnp.broadcast_to(columns[0, 0, :, n : n + 1], (size, LANES)) for n in (0, 1))
    for at in range(0, lanes, LANES):
        part = slice(at, at + LANES)
        # Selected, since the slot may hold anything.
        old = jnp.where(from_zeros, 0.0, before[0, :, part])
        state = old * jnp.exp(dt[0, :, part] * A[:, part]) + b * written[0, :, part]
        after[0, :, part] = state
        y[0, :, part] = jnp.sum(state * c, axis=0, keepdims=True)
