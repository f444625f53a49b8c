"""The gated delta rule on TPU: Pallas kernels that move every state once, from slot to slot.

Decode rows go through `tpu_decode`, prefill rows through `tpu_prefill`; a mixed batch runs both.
States stay in the pool: the kernels' own transfers read and write the slots, and the pool is
updated in place when the surrounding jit donates it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import platform as platform_
from pallas_kernels.gated_delta_rule import tpu_decode, tpu_prefill
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


class Heads(NamedTuple):
    """Key heads, value heads and their dims."""

    k: int
    v: int
    dk: int
    dv: int

    @classmethod
    def of(cls, q: tuple[int, ...], state: tuple[int, ...]) -> "Heads":
        """From the shapes of q [T, Hk, dk] and state [slots, Hv, dk, dv]."""
        return cls(q[1], state[1], state[2], state[3])


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
    chip, heads = _chip(), Heads.of(q.shape, state.shape)
    common = {
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "l2norm": l2norm,
        "vmem_limit": vmem_limit(chip),
        "interpret": interpret,
    }
    tokens, slots, rows = (q, k, v, g, beta), (read_slots, write_slots), ragged.num_rows_padded
    block = decode_heads(heads, chip)
    assert block is not None, "`refuses` has the reason"
    q0, k0, v0, g0, beta0 = (_first(x, rows) for x in tokens)
    first = q0, k0, v0, g0, beta0
    out, state = tpu_decode.decode(first, state, ragged, slots, heads=block, **common)
    if ragged.decode_only:
        return out, state
    block = prefill_heads(heads, q.dtype.itemsize, chip)
    assert block is not None, "`refuses` has the reason"
    rest, state = tpu_prefill.prefill(tokens, state, ragged, slots, heads=block, **common)
    is_decode = (jnp.arange(rows) < ragged.counts[0])[:, None]
    out, rest = out.reshape(rows, -1), rest.reshape(rest.shape[0], -1)
    merged = rest.at[:rows].set(jnp.where(is_decode, out, rest[:rows]))
    return merged.reshape(v.shape), state


def _first(x: jax.Array, rows: int) -> jax.Array:
    """x[:rows], sliced flat: layers have [T, H * d], which lies differently in memory."""
    return x.reshape(x.shape[0], -1)[:rows].reshape(rows, *x.shape[1:])


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
    chip, heads = CHIPS[facts.device_kind], Heads.of(q.shape, state.shape)
    itemsize = jnp.dtype(q.dtype).itemsize
    fits = decode_heads(heads, chip) and (
        facts.values["decode_only"] or prefill_heads(heads, itemsize, chip)
    )
    return None if fits else f"{facts.device_kind}'s VMEM is too small for one key head's group"


def decode_heads(heads: Heads, chip: Chip) -> int | None:
    """Value heads per grid step of decode, whose pipeline holds four blocks of states.

    Larger blocks hide more of a transfer's latency; 2 MiB are enough. None: not even the value
    heads of one key head fit.
    """
    most = min(vmem_limit(chip) // 8, 2 * MIB) // (4 * heads.dk * heads.dv)
    return _heads(heads, most, chip)


def prefill_heads(heads: Heads, itemsize: int, chip: Chip) -> int | None:
    """Value heads per grid step of prefill, for operands of `itemsize` bytes.

    16 fill the matrix unit. Float32 products are six times the work: 8 do, and compile faster.
    A head needs about 20 chunks of keys and of values. None: not even one key head's group fits.
    """
    per_head = 20 * tpu_prefill.CHUNK * (heads.dk + heads.dv) * itemsize
    return _heads(heads, min(vmem_limit(chip) // per_head, 32 // itemsize), chip)


def _heads(heads: Heads, most: int, chip: Chip) -> int | None:
    """The largest block of at most `most` value heads, one for each core at least."""
    group = heads.v // heads.k
    blocks = [n * group for n in range(1, heads.k + 1) if heads.k % n == 0]
    fitting = [block for block in blocks if block <= most]
    split = [block for block in fitting if heads.v // block >= chip.cores]
    return max(split or fitting, default=None)


def vmem_limit(chip: Chip) -> int:
    """Bytes that a kernel may use; the rest of VMEM is XLA's."""
    return min(chip.vmem * 7 // 8, 64 * MIB)


def _chip() -> Chip:
    """The chip to build for; interpreted kernels are built for v6e."""
    return CHIPS.get(platform_.current().kind, CHIPS["TPU v6e"])
