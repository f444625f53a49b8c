"""Decode on TPU: one token per row, one transfer of each state in and one out.

Rows are computed on the vector units in float32: channels lie along the lanes, so that v and the
output are rows, r, w, k, a and b are columns, and a sum over dk goes over whole vectors. Heads of
64 channels share a vector, whose columns are gathered, each lane that of its head. Gathers bound
the kernel, so that two operands in bfloat16 come in one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tpu_rows
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_chip import LANES
from pallas_kernels.tpu_rows import F32, Slots


def decode(
    tokens: tuple[jax.Array, ...],
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    heads: int,
    vmem_limit: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Decode rows of a batch; other rows touch no slot.

    Args:
        tokens: r, w, k [S, H, dk], v [S, H, dv], a, b [S, H, dk] of the first S tokens.
        state: f32[slots, dk, H * dv].
        ragged: row boundaries.
        slots: the slots to read and to write, i32[S] each.
        heads: heads per grid step, see `tpu_chip.head_block`.
        vmem_limit: bytes of VMEM that the kernel may use.
        interpret: as for `pl.pallas_call`.

    Returns:
        out f32[S, H, dv], 0 for rows that do not decode, and the new `state`.
    """
    r, w, k, v, a, b = tokens
    rows, all_heads, width = v.shape
    blocks = all_heads // heads
    packed = {x.dtype for x in (r, k, a, b)} == {jnp.dtype(jnp.bfloat16)}
    words = [_pair(r, k), _pair(a, b)] if packed else [_word(x) for x in (r, k, a, b)]
    # A head's operands as columns, those of a block of heads side by side.
    columns = jnp.stack([_word(jnp.exp(w)), *words])
    columns = columns.reshape(-1, rows, blocks, heads, r.shape[2]).transpose(2, 1, 4, 0, 3)
    columns = columns.reshape(blocks, rows, r.shape[2], -1)
    columns = jnp.pad(columns, ((0, 0), (0, 0), (0, 0), (0, -columns.shape[3] % LANES)))
    out, state = tpu_rows.decode(
        functools.partial(_row, width=width, packed=packed), [v.astype(F32).reshape(rows, -1)],
        columns, [], state, ragged, slots, name="rwkv7_decode", lanes=heads * width,
        vmem_limit=vmem_limit, interpret=interpret,
    )  # fmt: skip
    return out.reshape(v.shape), state


def _word(x: jax.Array) -> jax.Array:
    """The bits of x in float32, i32."""
    return lax.bitcast_convert_type(x.astype(F32), jnp.int32)


def _pair(x: jax.Array, y: jax.Array) -> jax.Array:
    """Two bfloat16 operands in the upper and the lower half of a word, i32."""
    return _word(x) | lax.shift_right_logical(_word(y), 16)


def _row(
    from_zeros: jax.Array, v, columns, before, out, after, *, width: int, packed: bool
) -> None:
    """One row, for one block of heads.

    VMEM: v, out f32[1, 1, H' dv]; columns i32[1, 1, dk, n H' and padding], of e^w, (r, k) and
    (a, b) if they are packed, else of e^w, r, k, a, b; before, after f32[1, dk, H' dv].
    """
    _, size, lanes = before.shape
    heads = lanes // width
    lane = lax.broadcasted_iota(jnp.int32, (size, LANES), 1)

    for at in range(0, lanes, LANES):
        part = slice(at, at + LANES)

        def column(operand: int, at: int = at) -> jax.Array:
            first = operand * heads + at // width
            begin = first // LANES * LANES
            vector = columns[0, 0, :, begin : begin + LANES]
            return jnp.take_along_axis(vector, first - begin + lane // width, axis=1)

        if packed:
            pairs = column(1), column(2)
            words = [half for pair in pairs for half in (pair & -(1 << 16), pair << 16)]
        else:
            words = [column(n) for n in range(1, 5)]
        kept, r, k, a, b = (lax.bitcast_convert_type(x, F32) for x in (column(0), *words))
        # Selected, since the slot may hold anything.
        old = jnp.where(from_zeros, 0.0, before[0, :, part])
        read = jnp.sum(old * a, axis=0, keepdims=True)
        state = kept * old + b * read + k * v[0, :, part]
        after[0, :, part] = state
        out[0, :, part] = jnp.sum(state * r, axis=0, keepdims=True)
