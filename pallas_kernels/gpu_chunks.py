"""How Triton kernels with a state per row go over prefill rows: chunk by chunk.

A program has some columns of one head's state in registers and goes over its row's chunks, in
matrix products. The padding at the end of the batch counts as one more row, of zeros. What does
not depend on states a kernel may compute beforehand, for all chunks at once and for all columns.
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
from pallas_kernels.gpu_tiles import Tile, tile_table
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts

TILE = 4096  # values of a state, of queries and of keys: what 256 threads hold without spills
MIN_SIDE, MAX_SIDE = 16, 32  # tokens and columns: less no product takes, more would spill
MAX_CHANNELS = TILE // MIN_SIDE
CHUNK = 64  # tokens, of which part is computed beforehand
LOWEST = -1e30  # an exponent of nothing


class Chunk(NamedTuple):
    """Tokens of one row and head; those behind its end are read as zeros."""

    token: jax.Array  # i32[C]
    real: jax.Array  # bool[C]
    number: jax.Array  # i32[] below `most_chunks`, of no other chunk; -1: of padding
    head: jax.Array  # i32[]
    heads: int

    def gates(self, ref: Any) -> jax.Array:
        """f32[C] of [T, H]."""
        return plgpu.load(ref.at[self.token, self.head], mask=self.real, other=0.0)

    def keys(self, ref: Any, channel: jax.Array | None = None) -> jax.Array:
        """[C, D] of [T, G, d], or some of the channels; head j there serves H / G heads."""
        at, mask = self._of(ref, channel)
        return plgpu.load(at, mask=mask, other=0.0)

    def write(self, ref: Any, keys: jax.Array, channel: jax.Array | None = None) -> None:
        """Stores keys [C, D] to [T, H, d], or some of the channels."""
        at, mask = self._of(ref, channel)
        plgpu.store(at, keys.astype(ref.dtype), mask=mask)

    def _of(self, ref: Any, channel: jax.Array | None) -> tuple[Any, jax.Array]:
        channel = jnp.arange(tile_of(ref.shape[2])) if channel is None else channel
        head = lax.div(self.head, self.heads // ref.shape[1])
        mask = self.real[:, None] & (channel < ref.shape[2])[None]
        return ref.at[self.token[:, None], head, channel[None]], mask

    def values(self, ref: Any, column: jax.Array) -> jax.Array:
        """f32[C, V] of [T, H, d]."""
        return self.keys(ref, column).astype(F32)


def most_chunks(ragged: RaggedBatch, num_tokens: int, size: int) -> int:
    """N, above the number of any chunk of `size` tokens."""
    return num_tokens // size + ragged.num_rows_padded


def _number(start: jax.Array, size: int, row: jax.Array) -> jax.Array:
    """Of the chunk of a row that starts there: a row's last chunk need not be full."""
    return lax.div(start, size) + row


def beforehand(
    body: Callable[..., None],
    operands: Sequence[jax.Array],
    out: Sequence[jax.ShapeDtypeStruct],
    ragged: RaggedBatch,
    *,
    name: str,
    heads: int,
    chunk: int,
    warps: int,
    interpret: Any = False,
) -> list[jax.Array]:
    """Runs a kernel over all chunks of prefill rows and heads.

    Args:
        body: (chunk, *refs of operands and of `out`): computes one chunk.
        operands: anything; the first is [T, ...].
        out: shapes; what no chunk writes stays undefined.
        ragged: row boundaries.
        name: of the kernel.
        heads: H.
        chunk: tokens of one.
        warps: of a program.
        interpret: as in `pl.pallas_call`.
    """
    tiles = tile_table(ragged, operands[0].shape[0], chunk)

    def kernel(tiles: Any, *refs: Any) -> None:
        tile, index = Tile.read(tiles, pl.program_id(0)), jnp.arange(chunk)
        real = (index < tile.length) & (tile.row >= 0)
        number = jnp.where(tile.row >= 0, _number(tile.start, chunk, tile.row), -1)
        body(Chunk(tile.start + index, real, number, pl.program_id(1), heads), *refs)

    return pl.pallas_call(
        kernel,
        grid=(tiles.shape[0], heads),
        out_shape=list(out),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(tiles, *operands)


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
    most = min(TILE // tile_of(state.shape[-2]), MAX_SIDE)
    chunk = chunk or most
    columns = columns or min(most, tile_of(out.shape[2]))
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
    channel = jnp.arange(tile_of(state.shape[-2]))
    column = part * columns + jnp.arange(columns)
    tile = (channel < state.shape[-2])[:, None] & (column < dv)[None]
    if len(state.shape) == 4:
        place = head, channel[:, None], column[None]
    else:
        place = channel[:, None], head * dv + column[None]
    continues = prefills & (lens[row] > end - start)
    old = plgpu.load(state.at[sources[row], *place], mask=tile & continues, other=0)

    def chunk(i: jax.Array, old: jax.Array) -> jax.Array:
        first = start + i * size
        token = first + jnp.arange(size)
        inside = token < end
        number = jnp.where(prefills, _number(first, size, row), -1)
        here = Chunk(token, inside & prefills, number, head, heads)
        result, new = body(here, column, old, *operands)
        mask = inside[:, None] & (column < dv)[None]
        at = out.at[token[:, None], head, column[None]]
        plgpu.store(at, result.astype(out.dtype), mask=mask)
        return new

    new = lax.fori_loop(0, lax.div(end - start + size - 1, size), chunk, old.astype(F32))
    plgpu.store(state.at[targets[row], *place], new.astype(state.dtype), mask=tile & prefills)


class Decay(NamedTuple):
    """The decay of a chunk since it began, until it ends, and over all of it."""

    growth: jax.Array | float  # f32[C, 1]
    rest: jax.Array | float  # f32[C, 1]
    whole: jax.Array  # f32[] or f32[D, 1]

    @classmethod
    def of(cls, total: jax.Array) -> "Decay":
        """With one log decay f32[C] per token, summed since the chunk began."""
        last = jnp.min(total)  # it never rises
        return cls(jnp.exp(total)[:, None], jnp.exp(last - total)[:, None], jnp.exp(last))


def advance(
    old: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    scores: jax.Array,
    decay: Decay,
) -> tuple[jax.Array, jax.Array]:
    """A chunk of S <- e^g S + k (x) v; o = S^T q.

    Args:
        old: f32[D, V] state.
        queries: [C, D]. keys: [C, D], to whose dtype operands of products are rounded.
        values: f32[C, V].
        scores: f32[C, C], decayed.
        decay: with decays per channel they are in queries and keys, and here is the whole.

    Returns:
        out f32[C, V] and the new state.
    """
    dtype = keys.dtype
    out = decay.growth * plgpu.dot(queries, old.astype(dtype))
    out += plgpu.dot(scores.astype(dtype), values.astype(dtype))
    kept = (decay.rest * values).astype(dtype)
    return out, decay.whole * old + plgpu.dot(keys.T, kept)


def head_scores(queries: jax.Array, keys: jax.Array, total: jax.Array) -> jax.Array:
    """q_i . k_j e^(total_i - total_j) [C, C] for j <= i, else 0; total f32[C] as in `Decay.of`."""
    index = jnp.arange(total.shape[0])
    lower = index[:, None] >= index[None]
    ratio = jnp.exp(jnp.where(lower, total[:, None] - total[None], LOWEST))
    return plgpu.dot(queries, keys.T) * ratio


def parts(x: jax.Array, count: int) -> list[jax.Array]:
    """Of f32 x in bfloat16, largest first; the sum of three is x."""
    result = []
    for _ in range(count):
        result.append(x.astype(jnp.bfloat16))
        x = x - result[-1].astype(F32)
    return result


def refuses(facts: Facts, *operands: str, channels: int, most: int = MAX_CHANNELS) -> str | None:
    """Why no kernel takes prefill rows of these operands and so many channels, or None."""
    for name in operands:
        if (dtype := facts.values[name].dtype) != "bfloat16":
            return f"prefill takes {', '.join(operands)} in bfloat16, not {name} in {dtype}"
    if channels > most:
        return f"prefill holds columns of {most} values, not of {channels}"
    return None


def tile_of(channels: int) -> int:
    """Channels filled up to what products take."""
    return max(gpu_chip.power_of_two(channels), MIN_SIDE)
