"""The gated delta rule on TPU: Pallas kernels that move every state once, from slot to slot.

Decode rows go through `tpu_decode`. States stay in the pool: the kernels' own transfers read and
write the slots, and the pool is updated in place when the surrounding jit donates it.
"""

from typing import NamedTuple

import jax

from pallas_kernels import platform as platform_
from pallas_kernels.gated_delta_rule import tpu_decode
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts

NAME = "mosaic_tpu"
MIB = 1 << 20
LANES = 128


class Chip(NamedTuple):
    """What block sizes depend on. A chip with two cores behind one device splits the heads."""

    vmem: int  # bytes per core
    cores: int


CHIPS = {
    "TPU v4": Chip(16 * MIB, 2),
    "TPU v5 lite": Chip(128 * MIB, 1),
    "TPU v5e": Chip(128 * MIB, 1),
    "TPU v5": Chip(64 * MIB, 2),
    "TPU v5p": Chip(64 * MIB, 2),
    "TPU v6 lite": Chip(128 * MIB, 1),
    "TPU v6e": Chip(128 * MIB, 1),
    "TPU7x": Chip(64 * MIB, 1),
}


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
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    chip = _chip()
    heads = decode_heads(q.shape[1], *state.shape[1:], chip)
    assert heads is not None and ragged.decode_only, "refused by `refuses`"
    return tpu_decode.decode(
        q, k, v, g, beta, state, ragged, read_slots, write_slots, heads=heads, scale=factor,
        l2norm=l2norm, vmem_limit=vmem_limit(chip), interpret=interpret,
    )  # fmt: skip


def refuses(facts: Facts) -> str | None:
    """Why these kernels cannot run, or None."""
    if facts.platform != "tpu":
        return f"is for TPU, not for {facts.platform}"
    if facts.device_kind not in CHIPS:
        return f"knows no {facts.device_kind!r}; known: {', '.join(CHIPS)}"
    q, k, v, state = (facts.values[name] for name in ("q", "k", "v", "state"))
    dtypes = {x.dtype for x in (q, k, v)}
    if len(dtypes) > 1 or dtypes & {"bfloat16", "float32"} != dtypes:
        return f"q, k and v must all be bfloat16 or all float32, not {', '.join(sorted(dtypes))}"
    dk, dv = state.shape[2:]
    if dk % LANES or dv % LANES:
        return f"head dims must be multiples of {LANES}, not {dk} and {dv}"
    if decode_heads(q.shape[1], *state.shape[1:], CHIPS[facts.device_kind]) is None:
        return f"no block of states of {dk} x {dv} fits {facts.device_kind}'s VMEM"
    if not facts.values["decode_only"]:
        return "has no prefill yet"
    return None


def decode_heads(k_heads: int, v_heads: int, dk: int, dv: int, chip: Chip) -> int | None:
    """Value heads per grid step of decode, whose pipeline holds four blocks of states.

    Larger blocks hide more of a transfer's latency; 2 MiB are enough. None: not even the value
    heads of one key head fit.
    """
    most = min(vmem_limit(chip) // 8, 2 * MIB) // (4 * dk * dv)
    return _heads(k_heads, v_heads, most, chip)


def _heads(k_heads: int, v_heads: int, most: int, chip: Chip) -> int | None:
    """The largest block of at most `most` value heads, one for each core at least."""
    group = v_heads // k_heads
    fitting = [n * group for n in range(1, k_heads + 1) if k_heads % n == 0 and n * group <= most]
    split = [heads for heads in fitting if v_heads // heads >= chip.cores]
    return max(split or fitting, default=None)


def vmem_limit(chip: Chip) -> int:
    """Bytes that a kernel may use; the rest of VMEM is XLA's."""
    return min(chip.vmem * 7 // 8, 64 * MIB)


def _chip() -> Chip:
    """The chip to build for; interpreted kernels are built for v6e."""
    return CHIPS.get(platform_.current().kind, CHIPS["TPU v6e"])
