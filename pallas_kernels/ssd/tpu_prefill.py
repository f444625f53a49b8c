"""Prefill on TPU: chunks of tokens in matrix products, states in VMEM from one chunk to the next.

`tpu_rows.prefill` goes over (head blocks, segments); tokens of a chunk that belong to other
segments are neutral: dt and log decay 0. Within a segment every stage is computed for all heads of
the block before the next stage begins, so that the matrix unit finds independent products.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tpu_rows
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_chip import LANES
from pallas_kernels.tpu_rows import CHUNK, F32, Decay, Slots, gates_by_block, products

Tokens = tuple[jax.Array, ...]  # x, B, C, log decay, dt, D


def prefill(
    tokens: Tokens,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    heads: int,
    vmem_limit: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Prefill rows of a batch; other rows touch no slot.

    Matrix products take bfloat16 operands if x is bfloat16, else float32; sums and the state are
    float32.

    Args:
        tokens: x [T, H, P], B [T, G, N], C [T, G, N], and log decay, dt and the skip's weight
            f32[T, H].
        state: f32[slots, N, H * P].
        ragged: row boundaries.
        slots: the slots to read and to write, i32[S] each.
        heads: heads per grid step, see `tpu_chip.head_block`.
        vmem_limit: bytes of VMEM that the kernel may use.
        interpret: as for `pl.pallas_call`.

    Returns:
        y [T, H, P], 0 for tokens outside prefill rows, and the new `state`.
    """
    x, B, C, g, dt, D = tokens
    body = functools.partial(_segment, groups=max(1, B.shape[1] * heads // x.shape[1]))
    return tpu_rows.prefill(
        body,
        [B, C, x],
        gates_by_block([g, dt, D], heads),
        state,
        (state.shape[1], heads * x.shape[2]),
        ragged,
        slots,
        name="ssd_prefill",
        heads=heads,
        vmem_limit=vmem_limit,
        interpret=interpret,
    )


def _segment(part, B, C, x, gates, y, state, *, groups: int) -> None:
    """The tokens `part` = (begin, end) of a chunk, for one block of heads.

    A vector of lanes holds the channels of one head or of several heads of one group.
    """
    _, size, lanes = state.shape
    heads = gates.shape[2] // 3
    width = lanes // heads
    V, G, sharing = range(lanes // LANES), range(groups), LANES // width
    dot = products(x.dtype)
    token = lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0)
    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    inside = (token >= part[0]) & (token < part[1])

    def load(ref, n: int, size: int) -> jax.Array:
        return jnp.where(inside, ref[:, n * size : (n + 1) * size].astype(F32), 0.0)

    def spread(columns: list[jax.Array], n: int) -> jax.Array:
        """The columns of the heads of vector n [c, 1 or 128], each over its head's lanes."""
        first, *others = columns[n * sharing : (n + 1) * sharing]
        for index, column in enumerate(others, 1):
            first = jnp.where(lane < index * width, first, column)
        return first

    gate = jnp.where(inside, gates[0], 0.0)
    dt, skip = ([gate[:, h : h + 1] for h in range(n * heads, (n + 1) * heads)] for n in (1, 2))
    growth, ratio, rest, whole = Decay.of(gate[:, :heads])
    keys, queries = ([load(ref, n, size) for n in G] for ref in (B, C))
    scores = [dot(queries[n], keys[n], transpose_rhs=True) for n in G]  # [C, C]
    group = [n * groups // len(V) for n in V]
    inputs = [load(x, n, LANES) for n in V]
    values = [inputs[n] * spread(dt, n) for n in V]
    mixed = [dot(scores[h * groups // heads] * ratio[h], values[h // sharing])
             for h in range(heads)]  # fmt: skip
    from_chunk = [spread(mixed, n) for n in V]
    from_state = [dot(queries[group[n]], state[0, :, n * LANES : (n + 1) * LANES]) for n in V]
    added = [dot(keys[group[n]], values[n] * spread(rest, n), transpose_lhs=True) for n in V]
    for n in V:
        at = slice(n * LANES, (n + 1) * LANES)
        new = from_chunk[n] + from_state[n] * spread(growth, n) + inputs[n] * spread(skip, n)
        y[:, at] = jnp.where(inside, new, y[:, at].astype(F32)).astype(y.dtype)
        state[0, :, at] = state[0, :, at] * spread(whole, n) + added[n]
