"""The gated delta net on TPU: decode rows in one kernel that moves every state once, in place.

Prefill rows go through the convolution by XLA, the gates by XLA, and the kernel of the gated delta
rule.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tpu_chip, tpu_rows
from pallas_kernels.causal_conv1d import causal_conv1d
from pallas_kernels.gated_delta_net import reference, tpu_decode
from pallas_kernels.gated_delta_net.operands import States, Weights
from pallas_kernels.gated_delta_rule import mosaic_tpu as delta_rule
from pallas_kernels.gated_delta_rule import tpu_prefill
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import ArrayFacts, Facts
from pallas_kernels.tpu_chip import LANES, Chip


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
        "vmem": chip.vmem,
        "interpret": interpret,
    }
    if ragged.decode_only:
        return tpu_decode.decode((qkv, a, b), state, ragged, slots, **options)
    # Decode rows go into the null slot here, so that their own slots are as they were.
    is_decode = jnp.arange(rows) < ragged.counts[0]
    mixed, conv = causal_conv1d(
        qkv, weights.conv, weights.conv_bias, state.conv, ragged, read_slots,
        jnp.where(is_decode, 0, write_slots), activation="silu",
    )  # fmt: skip
    state = States(conv, state.recurrent)
    first = qkv[:rows], a[:rows], b[:rows]
    out, state = tpu_decode.decode(first, state, ragged, slots, **options)
    q, k, v = reference.split(mixed, k_heads, state.recurrent.shape)
    gates = reference.gates(a, b, weights, allow_neg_eigval=allow_neg_eigval)
    heads = delta_rule.prefill_heads(q, state.recurrent, q.dtype.itemsize, chip)
    assert heads is not None, "`refuses` has the reason"
    rest, recurrent = tpu_prefill.prefill(
        (q, k, v, *gates), state.recurrent, ragged, slots,
        heads=heads, scale=LANES**-0.5, l2norm=True, vmem_limit=chip.vmem_limit,
        interpret=interpret,
    )  # fmt: skip
    return tpu_rows.merge(out, rest, ragged), States(state.conv, recurrent)


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
    chip, k_heads = tpu_chip.CHIPS[facts.device_kind], facts.values["k_heads"]
    q = ArrayFacts((qkv.shape[0], k_heads, dk), qkv.dtype)
    fits = fits_decode(qkv, state, chip) and (
        facts.values["decode_only"]
        or delta_rule.prefill_heads(q, state, jnp.dtype(q.dtype).itemsize, chip)
    )
    return None if fits else f"{facts.device_kind}'s VMEM is too small for a row's states"


def fits_decode(qkv: ArrayFacts, state: ArrayFacts, chip: Chip) -> bool:
    """Whether VMEM has room for the four states of decode's pipeline, for channels [T, C] and
    states [slots, Hv, dk, dv]. Everything else is at most 512 bytes per channel.
    """
    _, heads, dk, dv = state.shape
    return 4 * 4 * heads * dk * dv + 512 * qkv.shape[1] <= chip.vmem_limit
