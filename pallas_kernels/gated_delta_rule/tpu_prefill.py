"""Prefill on TPU: chunks of tokens in matrix products, states in VMEM from one chunk to the next.

`tpu_rows.prefill` goes over (head blocks, segments); tokens of a chunk that belong to other
segments are neutral: key, value, decay and write strength 0.

Within a segment every stage is computed for all heads of the block before the next stage begins:
the inverse is a chain of small products, and only other heads can fill the matrix unit meanwhile.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tpu_rows
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_decay import ChannelDecay
from pallas_kernels.tpu_rows import CHUNK, F32, Decay, gates_by_block, products

Tokens = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def prefill(
    tokens: Tokens,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: tuple[jax.Array, jax.Array],
    *,
    heads: int,
    scale: float,
    l2norm: bool,
    vmem_limit: int,
    interpret: object = False,
) -> tuple[jax.Array, jax.Array]:
    """Prefill rows of a batch; other rows touch no slot.

    `tokens` are q, k, v, g, beta, `slots` the slots to read and to write, as for
    `api.gated_delta_rule`. Matrix products take bfloat16 operands if q is
    bfloat16, else float32; sums and the state are float32.

    Args:
        heads: value heads per grid step, see `tpu_chip.head_block`.
        vmem_limit: bytes of VMEM that the kernel may use.
        interpret: as for `pl.pallas_call`.

    Returns:
        out [T, Hv, dv], 0 for tokens outside prefill rows, and the new `state`.
    """
    q, k, v, g, beta = tokens
    k_heads = max(1, q.shape[1] * heads // v.shape[1])
    body = functools.partial(_segment, k_heads=k_heads, scale=scale, l2norm=l2norm)
    per_channel = g.ndim == 3
    return tpu_rows.prefill(
        body,
        [g, q, k, v] if per_channel else [q, k, v],
        gates_by_block([beta] if per_channel else [beta, g], heads),
        state,
        (heads, *state.shape[2:]),
        ragged,
        slots,
        name="gated_delta_prefill",
        heads=heads,
        vmem_limit=vmem_limit,
        interpret=interpret,
    )


def _segment(part, *refs, k_heads: int, scale: float, l2norm: bool) -> None:
    """Chunked gated delta rule in WY form over the tokens `part` = (begin, end) of a chunk.

    `refs`: log decays, if they are per channel, q, k, v, gates, out and state.
    """
    *log_decay, q, k, v, gates, out, state = refs
    _, heads, dk, dv = state.shape
    group = heads // k_heads
    H, K = range(heads), range(k_heads)
    dot = products(q.dtype)
    row = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0)
    column = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)
    token = lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0)
    inside = (token >= part[0]) & (token < part[1])
    strict = row > column

    def load(ref, h: int, size: int) -> jax.Array:
        return jnp.where(inside, ref[:, h * size : (h + 1) * size].astype(F32), 0.0)

    gate = jnp.where(inside, gates[0], 0.0)
    beta = [gate[:, h : h + 1] for h in H]
    keys, queries = ([load(ref, j, dk) for j in K] for ref in (k, q))
    if l2norm:
        keys, queries = (
            [x * lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-6) for x in xs]
            for xs in (keys, queries)
        )
    queries = [x * scale for x in queries]
    if log_decay:
        decays = [
            ChannelDecay.of([keys[j], queries[j]], keys[j], load(log_decay[0], h, dk), q.dtype)
            for h, j in zip(H, (h // group for h in H), strict=True)
        ]
        growth, rest = [x.growth for x in decays], [x.rest for x in decays]
        whole = [jnp.broadcast_to(x.whole, (8, dk)).T[:, :1] for x in decays]
        scores = [x.scores for x in decays]
    else:
        growth, ratio, rest, whole = Decay.of(gate[:, heads:])
        growth, rest, whole = ([x[:, h : h + 1] for h in H] for x in (growth, rest, whole))
        pairs = [jnp.concatenate([keys[j], queries[j]], axis=0) for j in K]
        shared = [dot(pairs[j], keys[j], transpose_rhs=True) for j in K]  # [2C, C]
        scores = [[x * ratio[h] for x in jnp.split(shared[h // group], 2)] for h in H]
    below = [jnp.where(strict, scores[h][0] * beta[h], 0.0) for h in H]
    inverse = _unit_lower_inverse(below, row, column, dot)

    pairs = [
        jnp.concatenate([keys[h // group] * growth[h], queries[h // group] * growth[h]], axis=0)
        for h in H
    ]
    from_state = [dot(pairs[h], state[0, h]) for h in H]  # [2C, dv]
    missing = [(load(v, h, dv) - from_state[h][:CHUNK]) * beta[h] for h in H]
    delta = [dot(inverse[h], missing[h]) for h in H]
    from_chunk = [dot(scores[h][1], delta[h]) for h in H]
    added = [dot(keys[h // group] * rest[h], delta[h], transpose_lhs=True) for h in H]
    for h in H:
        lanes = slice(h * dv, (h + 1) * dv)
        new = from_state[h][CHUNK:] + from_chunk[h]
        out[:, lanes] = jnp.where(inside, new, out[:, lanes].astype(F32)).astype(out.dtype)
        state[0, h] = state[0, h] * whole[h] + added[h]


def _unit_lower_inverse(below, row, column, dot) -> list[jax.Array]:
    """Inverses of I + A for each strictly lower triangular A [C, C]; `row`, `column` are iotas.

    Diagonal blocks of twice the width: X - X B X, where B is A below the blocks that X inverts. No
    powers of A, which explode when keys repeat.
    """
    eye = (row == column).astype(F32)
    inverse = [eye - jnp.where(row // 2 == column // 2, a, 0.0) for a in below]
    width = 2
    while width < CHUNK:
        wide = 2 * width
        corner = (row // wide == column // wide) & (row // width > column // width)
        products = [dot(jnp.where(corner, a, 0.0), x) for a, x in zip(below, inverse, strict=True)]
        inverse = [x - dot(x, y) for x, y in zip(inverse, products, strict=True)]
        width = wide
    return inverse
