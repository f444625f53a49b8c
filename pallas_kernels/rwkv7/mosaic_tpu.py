"""RWKV-7's recurrence on TPU: a Pallas kernel that moves every state once, from slot to slot.

Decode rows go through `tpu_decode`, in mixed batches too; prefill rows through the reference.
"""

from typing import Any

import jax

from pallas_kernels import tpu_chip, tpu_rows
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import ArrayFacts, Facts
from pallas_kernels.rwkv7 import reference, tpu_decode
from pallas_kernels.tpu_chip import LANES, SUBLANES, Chip

Operand = jax.Array | ArrayFacts


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
    chip, rows, tokens = tpu_chip.current(), ragged.num_rows_padded, (r, w, k, v, a, b)
    heads = decode_heads(v, state, chip)
    assert heads is not None, "`refuses` has the reason"
    first = tuple(tpu_rows.first_rows(x, rows) for x in tokens)
    out, state = tpu_decode.decode(
        first, state, ragged, (read_slots, write_slots), heads=heads, vmem_limit=chip.vmem_limit,
        interpret=interpret,
    )  # fmt: skip
    out = out.astype(v.dtype)
    if ragged.decode_only:
        return out, state
    rest, state = reference.rwkv7(*tokens, state, ragged, read_slots, write_slots, decode=False)
    return tpu_rows.merge(out, rest, ragged), state


def refuses(facts: Facts) -> str | None:
    """Why this kernel cannot run, or None."""
    reason = tpu_chip.refuses(facts)
    if reason is not None:
        return reason
    v, state = facts.values["v"], facts.values["state"]
    (heads, width), size = v.shape[1:], state.shape[1]
    if LANES % width and width % LANES or heads * width % LANES or size % SUBLANES:
        return (
            f"dv must be a divisor or a multiple of {LANES}, the heads whole vectors of {LANES} "
            f"channels, and dk a multiple of {SUBLANES}; not {width}, {heads} heads, {size}"
        )
    if decode_heads(v, state, tpu_chip.CHIPS[facts.device_kind]) is None:
        return f"{facts.device_kind}'s VMEM is too small for one head's state of {size} x {width}"
    return None


def decode_heads(v: Operand, state: Operand, chip: Chip) -> int | None:
    """Heads per grid step of decode, for v [T, H, dv] and state [slots, dk, H * dv]."""
    _, heads, width = v.shape
    sharing = max(1, LANES // width)  # heads that share a vector of lanes stay together
    units, unit_bytes = heads // sharing, 4 * state.shape[1] * width * sharing
    blocks = tpu_chip.decode_heads("rwkv7", units, units, unit_bytes, chip)
    return None if blocks is None else blocks * sharing
