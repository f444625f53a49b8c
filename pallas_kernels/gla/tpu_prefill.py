"""Prefill on TPU: chunks of tokens in matrix products, states in VMEM from one chunk to the next.

`tpu_rows.prefill` goes over (head blocks, segments); tokens of a chunk that belong to other
segments are neutral: key, value and log decay 0. Within a segment every stage is computed for all
heads of the block before the next stage begins, so that the matrix unit finds independent products.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tpu_rows
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_decay import ChannelDecay
from pallas_kernels.tpu_rows import CHUNK, F32, Decay, Slots, gates_by_block, products

Tokens = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def prefill(
    tokens: Tokens,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    heads: int,
    scale: float,
    vmem_limit: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Prefill rows of a batch; other rows touch no slot.

    `tokens` are q, k, v, g as for `api.gla`, `slots` the slots to read and to write. Matrix
    products take bfloat16 operands if q is bfloat16, else float32; sums and the state are float32.

    Args:
        heads: value heads per grid step, see `tpu_chip.head_block`.
        vmem_limit: bytes of VMEM that the kernel may use.
        interpret: as for `pl.pallas_call`.

    Returns:
        out [T, Hv, dv], 0 for tokens outside prefill rows, and the new `state`.
    """
    q, k, v, g = tokens
    per_channel = g.ndim == 3
    k_heads = max(1, q.shape[1] * heads // v.shape[1])
    return tpu_rows.prefill(
        functools.partial(_segment, k_heads=k_heads, scale=scale, per_channel=per_channel),
        [q, k, g, v] if per_channel else [q, k, v],
        None if per_channel else gates_by_block([g], heads),
        state,
        (heads, *state.shape[2:]),
        ragged,
        slots,
        name="gla_prefill",
        heads=heads,
        vmem_limit=vmem_limit,
        interpret=interpret,
    )


def _segment(part, q, k, *refs, k_heads: int, scale: float, per_channel: bool) -> None:
    """The tokens `part` = (begin, end) of a chunk, for one block of heads."""
    g, v, out, state = refs if per_channel else (refs[i] for i in (1, 0, 2, 3))
    _, heads, dk, dv = state.shape
    H, K = range(heads), range(k_heads)
    group = heads // k_heads
    dot = products(q.dtype)
    token = lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0)
    inside = (token >= part[0]) & (token < part[1])

    def load(ref, h: int, size: int) -> jax.Array:
        return jnp.where(inside, ref[:, h * size : (h + 1) * size].astype(F32), 0.0)

    keys, queries = ([load(ref, j, dk) for j in K] for ref in (k, q))
    queries = [x * scale for x in queries]
    values = [load(v, h, dv) for h in H]
    if per_channel:
        decays = [
            ChannelDecay.of([queries[h // group]], keys[h // group], load(g, h, dk), q.dtype)
            for h in H
        ]
        growth, rest = [x.growth for x in decays], [x.rest for x in decays]
        whole = [jnp.broadcast_to(x.whole, (8, dk)).T[:, :1] for x in decays]
        scores = [x.scores[0] for x in decays]
    else:
        growth, ratio, rest, whole = Decay.of(jnp.where(inside, g[0], 0.0))
        growth, rest, whole = ([x[:, h : h + 1] for h in H] for x in (growth, rest, whole))
        shared = [dot(queries[j], keys[j], transpose_rhs=True) for j in K]
        scores = [shared[h // group] * ratio[h] for h in H]
    from_state = [dot(queries[h // group] * growth[h], state[0, h]) for h in H]
    from_chunk = [dot(scores[h], values[h]) for h in H]
    added = [dot(keys[h // group] * rest[h], values[h], transpose_lhs=True) for h in H]
    for h in H:
        lanes = slice(h * dv, (h + 1) * dv)
        new = from_state[h] + from_chunk[h]
        out[:, lanes] = jnp.where(inside, new, out[:, lanes].astype(F32)).astype(out.dtype)
        state[0, h] = state[0, h] * whole[h] + added[h]
