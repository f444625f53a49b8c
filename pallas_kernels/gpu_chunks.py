"""How Triton kernels with a state per row go over prefill rows: chunk by chunk.

A program has some columns of one head's state in registers and goes over its row's chunks, in
matrix products. The padding at the end of the batch counts as one more row, of zeros.
Letters: T tokens, H heads, C chunk, D channels up to a power of two, V columns of a program.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import gpu_chip
from pallas_kernels.gpu_rows import F32, Slots
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts

TILE = 4096  # values of a state, of queries and of keys: what 256 threads hold without spills
MIN_SIDE, MAX_SIDE = 16, 32  # tokens and columns: less no product takes, more would spill
MAX_CHANNELS = TILE // MIN_SIDE
LOWEST = -1e30  # an exponent of nothing


class Chunk(NamedTuple):
    """Tokens of one row and head; those behind its end are read as zeros."""

    token: jax.Array  # i32[C]
    real: jax.Array  # bool[C]
    head: jax.Array  # i32[]
    heads: int

    def gates(self, ref: Any) -> jax.Array:
        """f32[C] of [T, H]."""
        return plgpu.load(ref.at[self.token, self.head], mask=self.real, other=0.0)

    def keys(self, ref: Any) -> jax.Array:
        """[C, D] of [T, G, d]; head j there serves H / G heads."""
        channel = jnp.arange(_tile(ref.shape[2]))[None]
        head = lax.div(self.head, self.heads // ref.shape[1])
        mask = self.real[:, None] & (channel < ref.shape[2])
        return plgpu.load(ref.at[self.token[:, None], head, channel], mask=mask, other=0.0)

    def values(self, ref: Any, column: jax.Array) -> jax.Array:
        """f32[C, V] of [T, H, d]."""
        mask = self.real[:, None] & (column < ref.shape[2])[None]
        at = ref.at[self.token[:, None], self.head, column[None]]
        return plgpu.load(at, mask=mask, other=0.0).astype(F32)


ChunkBody = Callable[..., tuple[jax.Array, jax.Array]]
"""(chunk, column i32[V], state f32[D, V], *refs of operands) -> out f32[C, V], the new state."""


def prefill(
    body: ChunkBody,
    operands: Sequence[jax.Array],
    out: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    name: str,
    chunk: int | None = None,
    columns: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Runs a kernel over the prefill rows of a batch.

    Args:
        body: computes some columns of one chunk.
        operands: anything.
        out: [T, H, dv] with the output of the decode rows.
        state: [slots, H, dk, dv] or [slots, dk, H * dv].
        ragged: row boundaries. slots: read and write slots, i32[S] each.
        name: of the kernel.
        chunk: tokens of one; None: as many as registers hold.
        columns: of a head's state, to a program; None: likewise.
        interpret: as in `pl.pallas_call`.

    Returns:
        `out` with the output of the prefill rows and 0 for padding tokens, and `state` with their
        last states, both updated in place.
    """
    batch = ragged.query_start_loc, ragged.seq_lens, ragged.counts, *slots
    arguments = (*batch, *operands, out, state)
    most = min(TILE // _tile(state.shape[-2]), MAX_SIDE)
    chunk = chunk or most
    columns = columns or min(most, _tile(out.shape[2]))
    return pl.pallas_call(
        functools.partial(_kernel, body, chunk, columns),
        grid=(pl.cdiv(out.shape[2], columns), out.shape[1], ragged.num_rows_padded + 1),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, state)),
        input_output_aliases={len(arguments) - 2: 0, len(arguments) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name=name,
    )(*arguments)


def _kernel(
    body: ChunkBody, size: int, columns: int, starts: Any, lens: Any, counts: Any, sources: Any,
    targets: Any, *refs: Any,
) -> None:  # fmt: skip
    """Some columns of one head's state over all chunks of one row, or zeros for the padding."""
    *operands, _, _, out, state = refs
    part, head, index = (pl.program_id(axis) for axis in range(3))
    num_tokens, heads, dv = out.shape
    padding, row = index == lens.shape[0], jnp.minimum(index, lens.shape[0] - 1)
    prefills = (index >= counts[0]) & (index < counts[1])
    start = starts[jnp.where(padding, counts[1], row)]
    end = jnp.where(padding, num_tokens, jnp.where(prefills, starts[row + 1], start))
    channel = jnp.arange(_tile(state.shape[-2]))
    column = part * columns + jnp.arange(columns)
    tile = (channel < state.shape[-2])[:, None] & (column < dv)[None]
    if len(state.shape) == 4:
        place = head, channel[:, None], column[None]
    else:
        place = channel[:, None], head * dv + column[None]
    continues = prefills & (lens[row] > end - start)
    old = plgpu.load(state.at[sources[row], *place], mask=tile & continues, other=0)

    def chunk(i: jax.Array, old: jax.Array) -> jax.Array:
        token = start + i * size + jnp.arange(size)
        inside = token < end
        result, new = body(Chunk(token, inside & prefills, head, heads), column, old, *operands)
        mask = inside[:, None] & (column < dv)[None]
        at = out.at[token[:, None], head, column[None]]
        plgpu.store(at, result.astype(out.dtype), mask=mask)
        return new

    new = lax.fori_loop(0, lax.div(end - start + size - 1, size), chunk, old.astype(F32))
    plgpu.store(state.at[targets[row], *place], new.astype(state.dtype), mask=tile & prefills)


def advance(
    old: jax.Array, queries: jax.Array, keys: jax.Array, values: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A chunk of S <- e^g S + k (x) v; o = S^T q.

    Args:
        old: f32[D, V] state.
        queries: [C, D]. keys: [C, D], to whose dtype operands of products are rounded.
        values: f32[C, V].
        total: f32[C] log decay since the chunk began.

    Returns:
        out f32[C, V] and the new state.
    """
    dtype = keys.dtype
    scores = (product(queries, keys.T) * decay(total)).astype(dtype)
    out = jnp.exp(total)[:, None] * product(queries, old.astype(dtype))
    out += product(scores, values.astype(dtype))
    last = jnp.min(total)  # it never rises
    kept = jnp.exp(last - total)[:, None] * values
    return out, jnp.exp(last) * old + product(keys.T, kept.astype(dtype))


def decay(total: jax.Array) -> jax.Array:
    """e^(total_i - total_j) [C, C] for j <= i, else 0."""
    index = jnp.arange(total.shape[0])
    lower = index[:, None] >= index[None]
    return jnp.exp(jnp.where(lower, total[:, None] - total[None], LOWEST))


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """With float32 sums; float32 operands are rounded to tf32."""
    return plgpu.dot(a, b)


def refuses(facts: Facts, *operands: str, channels: int, most: int = MAX_CHANNELS) -> str | None:
    """Why no kernel takes prefill rows of these operands and so many channels, or None."""
    for name in operands:
        if (dtype := facts.values[name].dtype) != "bfloat16":
            return f"prefill takes {', '.join(operands)} in bfloat16, not {name} in {dtype}"
    if channels > most:
        return f"prefill holds columns of {most} values, not of {channels}"
    return None


def _tile(channels: int) -> int:
    """Channels filled up to what products take."""
    return max(gpu_chip.power_of_two(channels), MIN_SIDE)
