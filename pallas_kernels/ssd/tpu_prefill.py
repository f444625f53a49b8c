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
from jax.experimental.pallas import tpu as pltpu

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

    head = lax.broadcasted_iota(jnp.int32, (3 * heads, lanes), 0) % heads
    owner = lax.broadcasted_iota(jnp.int32, (3 * heads, lanes), 1) // width == head

    def spread(columns: jax.Array) -> list[jax.Array]:
        """Columns of all heads [c, heads], each over its head's lanes: [c, 128] per vector.

        A product with zeros and ones, exact since the columns go as three parts of 8 bits each:
        broadcasts would keep the units that move lanes busy longer than everything else.
        """
        parts = []
        for _ in range(3):
            bits = pltpu.bitcast(columns, jnp.uint32) & jnp.uint32(0xFFFF0000)
            parts.append(pltpu.bitcast(bits, F32))
            columns = columns - parts[-1]
        wide = products(jnp.bfloat16)(jnp.concatenate(parts, axis=1), owner.astype(F32))
        return [wide[:, n * LANES : (n + 1) * LANES] for n in V]

    def chosen(parts: list[jax.Array]) -> jax.Array:
        """[C, 128] of the heads of a vector: of each its own lanes."""
        first, *others = parts
        for index, part in enumerate(others, 1):
            first = jnp.where(lane < index * width, first, part)
        return first

    gate = jnp.where(inside, gates[0], 0.0)
    growth, ratio, rest, whole = Decay.of(gate[:, :heads])
    # What is the same for all tokens goes as the rows of one tile.
    whole = spread(jnp.broadcast_to(whole, (8, heads)))
    skip = spread(gates[0, :8, 2 * heads :])
    growth, rest, dt = spread(growth), spread(rest), spread(gate[:, heads : 2 * heads])
    keys, queries = ([load(ref, n, size) for n in G] for ref in (B, C))
    scores = [dot(queries[n], keys[n], transpose_rhs=True) for n in G]  # [C, C]
    group = [n * groups // len(V) for n in V]
    inputs = [load(x, n, LANES) for n in V]
    values = [inputs[n] * dt[n] for n in V]
    mixed = [dot(scores[h * groups // heads] * ratio[h], values[h // sharing])
             for h in range(heads)]  # fmt: skip
    from_chunk = [chosen(mixed[n * sharing : (n + 1) * sharing]) for n in V]
    from_state = [dot(queries[group[n]], state[0, :, n * LANES : (n + 1) * LANES]) for n in V]
    added = [dot(keys[group[n]], values[n] * rest[n], transpose_lhs=True) for n in V]
    for n in V:
        at = slice(n * LANES, (n + 1) * LANES)
        new = from_chunk[n] + from_state[n] * growth[n] + inputs[n] * skip[n][:1]
        y[:, at] = jnp.where(inside, new, y[:, at].astype(F32)).astype(y.dtype)
        state[0, :, at] = state[0, :, at] * whole[n][:1] + added[n]
