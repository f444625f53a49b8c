"""Mamba-2's recurrence on TPU: Pallas kernels that move every state once, from slot to slot.

Decode rows go through the kernel of `gla`, prefill rows through `tpu_prefill`; a mixed batch runs
both.
What is elementwise in x and dt comes from XLA, which fuses it with what makes them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tpu_chip, tpu_rows
from pallas_kernels.gla import tpu_decode
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import ArrayFacts, Facts
from pallas_kernels.ssd import tpu_prefill
from pallas_kernels.ssd.reference import add_skip, step_size
from pallas_kernels.tpu_chip import LANES, Chip

F32 = jnp.float32
Operand = jax.Array | ArrayFacts


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
    chip, rows, slots = tpu_chip.current(), ragged.num_rows_padded, (read_slots, write_slots)
    dt = step_size(dt, dt_bias, dt_limit)
    g = dt * A.astype(F32)[None]
    common = {"vmem_limit": chip.vmem_limit, "interpret": interpret}
    block = decode_heads(x, B, chip)
    assert block is not None, "`refuses` has the reason"
    x0, dt0, g0, B0, C0 = (tpu_rows.first_rows(operand, rows) for operand in (x, dt, g, B, C))
    x0 = jnp.where(ragged.row_valid[:, None, None], x0.astype(F32), 0.0)
    y, state = tpu_decode.decode(
        C0, B0, dt0[:, :, None] * x0, g0, state, ragged, slots,
        name="ssd_decode", heads=block, **common,
    )  # fmt: skip
    y = add_skip(y, x0, D).astype(x.dtype)
    if ragged.decode_only:
        return y, state
    block = prefill_heads(x, B, chip)
    assert block is not None, "`refuses` has the reason"
    skip = jnp.zeros_like(dt) if D is None else jnp.broadcast_to(D.astype(F32)[None], dt.shape)
    tokens = (x, B, C, g, dt, skip)
    rest, state = tpu_prefill.prefill(tokens, state, ragged, slots, heads=block, **common)
    return tpu_rows.merge(y, rest, ragged), state


def refuses(facts: Facts) -> str | None:
    """Why these kernels cannot run, or None."""
    reason = tpu_chip.refuses(facts) or tpu_chip.refuses_dtypes(facts, "x", "B", "C")
    if reason is not None:
        return reason
    x, B = facts.values["x"], facts.values["B"]
    (heads, width), (groups, size) = x.shape[1:], B.shape[1:]
    reason = refuses_heads(heads, width, groups, size)
    if reason is not None:
        return reason
    chip = tpu_chip.CHIPS[facts.device_kind]
    blocks = decode_heads(x, B, chip), prefill_heads(x, B, chip)
    if None in blocks[: 1 if facts.values["decode_only"] else 2]:
        return f"{facts.device_kind}'s VMEM is too small for one head's state of {size} x {width}"
    return None


def refuses_heads(heads: int, width: int, groups: int, size: int) -> str | None:
    """Why heads of `width` channels and groups of weights of `size` do not lie in whole vectors."""
    if size % LANES or LANES % width or heads // groups * width % LANES:
        return (
            f"state size must be a multiple of {LANES}, head dim a divisor of it, and a group's "
            f"heads whole vectors of {LANES} channels; not {size}, {width}, {heads // groups} heads"
        )
    return None


def decode_heads(x: Operand, B: Operand, chip: Chip) -> int | None:
    """Heads per grid step of decode, for x [T, H, P] and B [T, G, N]."""
    _, heads, width = x.shape
    sharing = LANES // width  # heads that share a vector of lanes stay together
    state = 4 * LANES * B.shape[2]
    vectors = tpu_chip.decode_heads("ssd", B.shape[1], heads // sharing, state, chip)
    return None if vectors is None else vectors * sharing


def prefill_heads(x: Operand, B: Operand, chip: Chip) -> int | None:
    """Heads per grid step of prefill, for x [T, H, P] and B [T, G, N].

    A vector of lanes needs about ten chunks of scores and values. None: not even one fits.
    """
    _, heads, width = x.shape
    sharing, itemsize = LANES // width, jnp.dtype(x.dtype).itemsize
    each = 10 * tpu_rows.CHUNK * (sharing * LANES + B.shape[2]) * itemsize
    most = min(chip.vmem_limit // each, 32 // itemsize)
    shape = B.shape[1], heads // sharing, B.shape[2], itemsize
    vectors = tpu_chip.head_block("ssd.prefill_heads", shape, most, chip)
    return None if vectors is None else vectors * sharing
