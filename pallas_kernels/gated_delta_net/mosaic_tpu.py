"""The gated delta net on TPU: decode rows in one kernel that moves every state once, in place.

Prefill rows go through another one, a chunk of tokens at a time; between its chunks a row's states
stay in VMEM.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tpu_chip, tpu_rows
from pallas_kernels.gated_delta_net import tpu_decode, tpu_prefill
from pallas_kernels.gated_delta_net.operands import States, Weights
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import ArrayFacts, Facts
from pallas_kernels.tpu_chip import LANES, Chip
from pallas_kernels.tpu_rows import CHUNK


def gated_delta_net(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    state: States,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    weights: Weights,
    k_heads: int,
    allow_neg_eigval: bool,
    interpret: Any = False,
) -> tuple[jax.Array, States]:
    """See `api.gated_delta_net`. `interpret` is that of `pl.pallas_call`, for tests on CPU."""
    chip, rows = tpu_chip.current(), ragged.num_rows_padded
    slots = read_slots, write_slots
    options = {
        "weights": weights,
        "k_heads": k_heads,
        "max_beta": 2.0 if allow_neg_eigval else 1.0,
        "interpret": interpret,
    }
    if ragged.decode_only:
        return tpu_decode.decode((qkv, a, b), state, ragged, slots, vmem=chip.vmem, **options)
    heads = prefill_heads(k_heads, b.shape[1], qkv.dtype)
    assert heads is not None, "`refuses` has the reason"
    # Were it all of VMEM, a batch of 1,024 tokens would not compile.
    limit = chip.vmem_limit
    first = qkv[:rows], a[:rows], b[:rows]
    out, state = tpu_decode.decode(first, state, ragged, slots, vmem=limit, **options)
    rest, state = tpu_prefill.prefill(
        (qkv, a, b), state, ragged, slots, heads=heads, vmem_limit=limit, **options
    )
    return tpu_rows.merge(out, rest, ragged), state


def refuses(facts: Facts) -> str | None:
    """Why these kernels cannot run, or None."""
    reason = tpu_chip.refuses(facts) or tpu_chip.refuses_dtypes(facts, "qkv", "a", "b")
    if reason is not None:
        return reason
    qkv, state = facts.values["qkv"], facts.values["state"]
    if len(facts.values["a"].shape) == 3:
        return "has one decay per head, not one per key channel"
    if state.dtype != "float32":
        return f"keeps states in float32, not in {state.dtype}"
    dk, dv = state.shape[2:]
    if (dk, dv) != (LANES, LANES):
        return f"head dims must be {LANES}, not {dk} and {dv}"
    chip = tpu_chip.CHIPS[facts.device_kind]
    if not fits_decode(qkv, state, chip):
        return (
            f"{facts.device_kind}'s VMEM is too small for a row's {state.shape[1]} states of "
            f"{dk} x {dv}"
        )
    if facts.values["decode_only"]:
        return None
    if prefill_heads(facts.values["k_heads"], state.shape[1], qkv.dtype) is None:
        return f"{state.shape[1]} value heads are too many for {facts.values['k_heads']} key heads"
    if not fits_prefill(qkv, state, chip):
        return (
            f"{facts.device_kind}'s VMEM is too small for {CHUNK} tokens and a row's "
            f"{state.shape[1]} states of {dk} x {dv}"
        )
    return None


def prefill_heads(k_heads: int, v_heads: int, dtype: Any) -> int | None:
    """Value heads whose stages prefill computes together: those of some key heads.

    16 fill the matrix unit. Float32 products are six times the work: 8 do, and compile faster.
    """
    group, most = v_heads // k_heads, 32 // jnp.dtype(dtype).itemsize
    whole = [n * group for n in range(1, k_heads + 1) if k_heads % n == 0]
    return max((block for block in whole if block <= most), default=None)


def fits_decode(qkv: ArrayFacts, state: ArrayFacts, chip: Chip) -> bool:
    """Whether VMEM has room for the four states of decode's pipeline, for channels [T, C] and
    states [slots, Hv, dk, dv]. Everything else is at most 512 bytes per channel.
    """
    _, heads, dk, dv = state.shape
    return 4 * 4 * heads * dk * dv + 512 * qkv.shape[1] <= chip.vmem_limit


def fits_prefill(qkv: ArrayFacts, state: ArrayFacts, chip: Chip) -> bool:
    """Whether VMEM has room for prefill: for the states of its pipeline, for two chunks of channels
    and outputs, for the convolution's window, and for what registers cannot hold.
    """
    _, heads, dk, dv = state.shape
    per_channel = 4 * CHUNK * jnp.dtype(qkv.dtype).itemsize + 1280
    return 4 * 4 * heads * dk * dv + per_channel * qkv.shape[1] <= chip.vmem_limit
