"""The gated delta rule on TPU: Pallas kernels that move every state once, from slot to slot.

Decode rows go through `tpu_decode`, prefill rows through `tpu_prefill`; a mixed batch runs both.
States stay in the pool: the kernels' own transfers read and write the slots, and the pool is
updated in place when the surrounding jit donates it.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import tpu_chip, tpu_rows
from pallas_kernels.gated_delta_rule import tpu_decode, tpu_prefill
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import ArrayFacts, Facts
from pallas_kernels.tpu_chip import LANES, Chip

Operand = jax.Array | ArrayFacts


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
    interpret: object = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.gated_delta_rule`. `interpret` is that of `pl.pallas_call`, for tests on CPU."""
    chip = tpu_chip.current()
    common = {
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "l2norm": l2norm,
        "vmem_limit": chip.vmem_limit,
        "interpret": interpret,
    }
    tokens, slots, rows = (q, k, v, g, beta), (read_slots, write_slots), ragged.num_rows_padded
    block = decode_heads(q, state, chip)
    assert block is not None, "`refuses` has the reason"
    q0, k0, v0, g0, beta0 = (tpu_rows.first_rows(x, rows) for x in tokens)
    first = q0, k0, v0, g0, beta0
    out, state = tpu_decode.decode(first, state, ragged, slots, heads=block, **common)
    if ragged.decode_only:
        return out, state
    block = prefill_heads(q, state, q.dtype.itemsize, chip)
    assert block is not None, "`refuses` has the reason"
    rest, state = tpu_prefill.prefill(tokens, state, ragged, slots, heads=block, **common)
    return tpu_rows.merge(out, rest, ragged), state


def refuses(facts: Facts) -> str | None:
    """Why these kernels cannot run, or None."""
    reason = tpu_chip.refuses(facts) or tpu_chip.refuses_dtypes(facts, "q", "k", "v")
    if reason is not None:
        return reason
    q, state = facts.values["q"], facts.values["state"]
    if state.dtype != "float32":
        return f"keeps states in float32, not in {state.dtype}"
    dk, dv = state.shape[2:]
    if dk % LANES or dv % LANES:
        return f"head dims must be multiples of {LANES}, not {dk} and {dv}"
    chip = tpu_chip.CHIPS[facts.device_kind]
    fits = decode_heads(q, state, chip) and (
        facts.values["decode_only"] or prefill_heads(q, state, jnp.dtype(q.dtype).itemsize, chip)
    )
    if not fits:
        return f"{facts.device_kind}'s VMEM is too small for one head's state of {dk} x {dv}"
    return None


def decode_heads(q: Operand, state: Operand, chip: Chip) -> int | None:
    """Value heads per grid step of decode, for q [T, Hk, dk] and state [slots, Hv, dk, dv]."""
    _, heads, dk, dv = state.shape
    return tpu_chip.decode_heads("gated_delta_rule", q.shape[1], heads, 4 * dk * dv, chip)


def prefill_heads(q: Operand, state: Operand, itemsize: int, chip: Chip) -> int | None:
    """Value heads per grid step of prefill, for operands of `itemsize` bytes.

    16 fill the matrix unit. Float32 products are six times the work: 8 do, and compile faster.
    A head needs about 20 chunks of keys and of values. None: not even one fits.
    """
    _, heads, dk, dv = state.shape
    per_head = 20 * tpu_rows.CHUNK * (dk + dv) * itemsize
    most = min(chip.vmem_limit // per_head, 32 // itemsize)
    shape = q.shape[1], heads, dk, dv, itemsize
    return tpu_chip.head_block("gated_delta_rule.prefill_heads", shape, most, chip)
