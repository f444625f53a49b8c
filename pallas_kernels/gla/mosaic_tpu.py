"""Gated linear attention on TPU: Pallas kernels that move every state once, from slot to slot.

Decode rows go through `tpu_decode`, prefill rows through `tpu_prefill`; a mixed batch runs both.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tpu_chip, tpu_rows
from pallas_kernels.gla import tpu_decode, tpu_prefill
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import ArrayFacts, Facts
from pallas_kernels.tpu_chip import LANES, Chip

F32 = jnp.float32
Operand = jax.Array | ArrayFacts


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
    chip, rows, slots = tpu_chip.current(), ragged.num_rows_padded, (read_slots, write_slots)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    common = {"vmem_limit": chip.vmem_limit, "interpret": interpret}
    block = decode_heads(q, state, chip)
    assert block is not None, "`refuses` has the reason"
    q0, k0, v0 = (tpu_rows.first_rows(x, rows).astype(F32) for x in (q, k, v))
    out, state = tpu_decode.decode(
        q0 * factor, k0, v0, g[:rows], state, ragged, slots,
        name="gla_decode", heads=block, **common,
    )  # fmt: skip
    out = out.astype(v.dtype)
    if ragged.decode_only:
        return out, state
    block = prefill_heads(q, state, chip)
    assert block is not None, "`refuses` has the reason"
    rest, state = tpu_prefill.prefill(
        (q, k, v, g), state, ragged, slots, heads=block, scale=factor, **common
    )
    return tpu_rows.merge(out, rest, ragged), state


def refuses(facts: Facts) -> str | None:
    """Why these kernels cannot run, or None."""
    reason = tpu_chip.refuses(facts) or tpu_chip.refuses_dtypes(facts, "q", "k", "v")
    if reason is not None:
        return reason
    q, state = facts.values["q"], facts.values["state"]
    dk, dv = state.shape[2:]
    if dk % LANES or dv % LANES:
        return f"head dims must be multiples of {LANES}, not {dk} and {dv}"
    chip = tpu_chip.CHIPS[facts.device_kind]
    blocks = decode_heads(q, state, chip), prefill_heads(q, state, chip)
    if None in blocks[: 1 if facts.values["decode_only"] else 2]:
        return f"{facts.device_kind}'s VMEM is too small for one head's state of {dk} x {dv}"
    return None


def decode_heads(q: Operand, state: Operand, chip: Chip) -> int | None:
    """Value heads per grid step of decode, for q [T, Hk, dk] and state [slots, Hv, dk, dv]."""
    _, heads, dk, dv = state.shape
    return tpu_chip.decode_heads("gla", q.shape[1], heads, 4 * dk * dv, chip)


def prefill_heads(q: Operand, state: Operand, chip: Chip) -> int | None:
    """Value heads per grid step of prefill, for q [T, Hk, dk] and state [slots, Hv, dk, dv].

    16 fill the matrix unit; float32 products are six times the work: 8 do, and compile faster. A
    head needs four blocks of its state and about ten chunks of keys and of values. None: not even
    one fits.
    """
    _, heads, dk, dv = state.shape
    itemsize = jnp.dtype(q.dtype).itemsize
    each = 4 * 4 * dk * dv + 40 * tpu_rows.CHUNK * (dk + dv)
    most = min(chip.vmem_limit // each, 32 // itemsize)
    shape = q.shape[1], heads, dk, dv, itemsize
    return tpu_chip.head_block("gla.prefill_heads", shape, most, chip)
