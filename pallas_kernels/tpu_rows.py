"""How TPU kernels with a state per row go over a ragged batch: grids, slots and segments.

Decode kernels have a grid step per row. Prefill kernels have one per segment: the token axis is cut
at multiples of CHUNK and where rows begin and end, so that every transfer is a whole, aligned
chunk. Either way the pipeline fetches a state from the slot that the step names, and a step that
names the slot of the step before it moves nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32
CHUNK = 128
ROWS = 16  # decode rows whose tokens come in one transfer: the sublanes of a bfloat16 tile
NEVER = -1e30  # a log decay: exp gives 0
Slots = tuple[jax.Array, jax.Array]  # to read, to write

# What is to be done in a segment, as bits.
VALID = 1  # has tokens of a prefill row
FIRST = 2  # the row begins
FRESH = 4  # and from zeros
OPENS = 8  # the chunk of tokens begins
NOTHING = 16  # the batch has no prefill rows
LAST = 32  # the row ends


def decode_schedule(
    ragged: RaggedBatch, slots: Slots
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Per row, i32[S]: slot to read, slot to write, starts from zeros; and the decode rows, i32[1].

    A grid step must name a block even if it has no use for it. Naming the block of an earlier row
    again moves nothing, so rows that start from zeros read, and rows that do not decode read and
    write, "what the row before them did". Where there is none it is the null slot.
    """
    read_slots, write_slots = slots
    row = jnp.arange(ragged.num_rows_padded, dtype=jnp.int32)
    count = ragged.counts[:1]
    reads = (row < count) & ragged.has_state
    reader = lax.cummax(jnp.where(reads, row, -1))
    source = jnp.where(reader >= 0, read_slots[jnp.maximum(reader, 0)], 0)
    writer = jnp.minimum(row, count - 1)
    target = jnp.where(writer >= 0, write_slots[jnp.maximum(writer, 0)], 0)
    return source, target, 1 - ragged.has_state.astype(jnp.int32), count


# Of a row: whether it starts from zeros, refs of tokens, columns, constants, before, out, after.
RowBody = Callable[..., None]


def decode(
    body: RowBody,
    tokens: Sequence[jax.Array],
    columns: jax.Array,
    constants: Sequence[jax.Array],
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    name: str,
    lanes: int,
    vmem_limit: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Runs a kernel over the decode rows of a batch, of states whose channels lie along the lanes.

    The grid goes over (blocks of channels, rows). The pipeline fetches the state of row i + 1 from
    its read slot while row i is computed and row i - 1 is on its way to its write slot. Other rows
    touch no slot.

    Args:
        body: computes one row for one block of channels, from refs in VMEM: tokens [1, 1, lanes]
            each, columns [1, 1, n, m], constants [N, lanes] each, before [1, N, lanes] or [1,
            heads, N, dv], which may hold anything if the row starts from zeros, out [1, 1, lanes]
            and after, like before.
        tokens: f32[S, channels] each.
        columns: [parts, S, n, m], of which each serves as many blocks.
        constants: [N, channels] each.
        state: [slots, N, channels], or by head [slots, H, N, dv] with H dv channels.
        ragged: row boundaries.
        slots: the slots to read and to write, i32[S] each.
        name: of the kernel.
        lanes: channels per grid step, whole heads.
        vmem_limit: bytes of VMEM that the kernel may use.
        interpret: as for `pl.pallas_call`.

    Returns:
        out f32[S, channels], 0 for rows that do not decode, and the new `state`.
    """
    rows, channels = tokens[0].shape
    blocks, parts = channels // lanes, columns.shape[0]
    by_row = (rows, 1, channels)
    row = pl.BlockSpec((1, 1, lanes), lambda j, i, *_: (i, 0, j))

    def slot(which: int) -> pl.BlockSpec:
        if state.ndim == 4:
            shape = (1, lanes // state.shape[3], *state.shape[2:])
            return pl.BlockSpec(shape, lambda j, i, *scalars: (scalars[which][i], j, 0, 0))
        shape = (1, state.shape[1], lanes)
        return pl.BlockSpec(shape, lambda j, i, *scalars: (scalars[which][i], 0, j))

    schedule = decode_schedule(ragged, slots)
    operands = (*schedule, *(x.reshape(by_row) for x in tokens), columns, *constants, state)
    out, state = pl.pallas_call(
        functools.partial(_decode_kernel, body),
        name=name,
        out_shape=(
            jax.ShapeDtypeStruct(by_row, F32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(schedule),
            grid=(blocks, rows),
            in_specs=[
                *(row for _ in tokens),
                pl.BlockSpec(
                    (1, 1, *columns.shape[2:]),
                    lambda j, i, *_: (j * parts // blocks if parts > 1 else 0, i, 0, 0),
                ),
                *(pl.BlockSpec((len(x), lanes), lambda j, i, *_: (0, j)) for x in constants),
                slot(0),
            ],
            out_specs=(row, slot(1)),
        ),
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit
        ),
        interpret=interpret,
    )(*operands)
    return out.reshape(rows, channels), state


def _decode_kernel(body: RowBody, source, target, fresh, count, *refs) -> None:
    """One row, for one block of channels. SMEM: `decode_schedule`. VMEM: as for the body."""
    del source, target  # used by the index maps
    before, out, after = refs[-3:]
    i = pl.program_id(1)

    @pl.when(i >= count[0])
    def _padding() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when(i < count[0])
    def _row() -> None:
        body(fresh[i] == 1, *refs)

    # Without decode rows the null slot is written, with what it held.
    @pl.when((i == 0) & (count[0] == 0))
    def _nothing() -> None:
        after[...] = before[...]


def decode_whole(
    kernel: Callable[..., None],
    tokens: Sequence[jax.Array],
    layer: Sequence[jax.Array],
    pools: Sequence[jax.Array],
    ragged: RaggedBatch,
    slots: Slots,
    *,
    name: str,
    width: int,
    scratch: Sequence[Any],
    vmem: int,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Runs a kernel over the decode rows of a batch, of several pools and with all heads at once.

    The grid goes over rows. The pipeline fetches the slots of row i + 1 while row i is computed and
    row i - 1 is on its way to its slots. Other rows touch no slot.

    Args:
        kernel: of one row. Its refs: `decode_schedule` in SMEM; in VMEM tokens [R, n] each, of the
            R rows that are a block with this one, layer, the slots [1, ...] of the pools before,
            out [R, width], and the slots after; scratch.
        tokens: [S, n] each; out has the dtype of the first.
        layer: what is the same for all rows.
        pools: [slots, ...] each, updated in place.
        ragged: row boundaries.
        slots: the slots to read and to write, i32[S] each.
        name: of the kernel.
        width: of out.
        scratch: of the kernel.
        vmem: bytes of VMEM. The kernel claims all of it: in what is left XLA would put a small pool
            and copy it there and back as a whole.
        interpret: as for `pl.pallas_call`.

    Returns:
        out [S, width], and the new `pools`.
    """
    rows = tokens[0].shape[0]
    size = min(rows, ROWS)
    out = jax.ShapeDtypeStruct((rows, width), tokens[0].dtype)

    def part(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        return pl.BlockSpec((size, x.shape[1]), lambda i, *_: (i // size, 0))

    def whole(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda i, *_: (0,) * x.ndim)

    def slot(which: int, x: jax.Array) -> pl.BlockSpec:
        rest = (0,) * (x.ndim - 1)
        return pl.BlockSpec((1, *x.shape[1:]), lambda i, *scalars: (scalars[which][i], *rest))

    schedule = decode_schedule(ragged, slots)
    given = len(schedule) + len(tokens) + len(layer)
    return pl.pallas_call(
        kernel,
        name=name,
        out_shape=(out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(schedule),
            grid=(rows,),
            in_specs=[
                *(part(x) for x in tokens),
                *(whole(x) for x in layer),
                *(slot(0, x) for x in pools),
            ],
            out_specs=(part(out), *(slot(1, x) for x in pools)),
            scratch_shapes=scratch,
        ),
        input_output_aliases={given + n: 1 + n for n in range(len(pools))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem
        ),
        interpret=interpret,
    )(*schedule, *tokens, *layer, *pools)


def gates_by_block(gates: Sequence[jax.Array], heads: int) -> jax.Array:
    """Gates f32[T, Hv] of each block of `heads` side by side: [blocks, T, len(gates) * heads].

    So that a block of lanes needs no offset.
    """
    tokens, v_heads = gates[0].shape
    blocks = v_heads // heads
    stacked = jnp.stack(gates).reshape(len(gates), tokens, blocks, heads)
    return stacked.transpose(2, 1, 0, 3).reshape(blocks, tokens, len(gates) * heads)


def head_part(x: jax.Array, blocks: int) -> tuple[int, Callable[[jax.Array], jax.Array | int]]:
    """How an operand [T, H, d], seen as [T, H * d], is cut for `blocks` blocks of value heads.

    Returns the lanes of a part and the part of block j: that of a key head serves several blocks if
    its value heads are spread over them.
    """
    parts = min(blocks, x.shape[1])
    return x.shape[1] * x.shape[2] // parts, lambda j: j * parts // blocks if parts > 1 else 0


def first_rows(x: jax.Array, rows: int) -> jax.Array:
    """x[:rows], sliced flat: layers have [T, H * d], which lies differently in memory."""
    return x.reshape(x.shape[0], -1)[:rows].reshape(rows, *x.shape[1:])


def merge(decoded: jax.Array, prefilled: jax.Array, ragged: RaggedBatch) -> jax.Array:
    """The output [T, Hv, dv] of a mixed batch from that of its decode rows [S, Hv, dv] and of its
    prefill rows [T, Hv, dv], either of which is 0 for the others.
    """
    rows = ragged.num_rows_padded
    is_decode = (jnp.arange(rows) < ragged.counts[0])[:, None]
    flat, first = prefilled.reshape(prefilled.shape[0], -1), decoded.reshape(rows, -1)
    merged = flat.at[:rows].set(jnp.where(is_decode, first, flat[:rows]))
    return merged.reshape(prefilled.shape)


class Segments(NamedTuple):
    """Per grid step, i32[N]: its chunk of tokens, the part [begin, end) of it, bits, and slots."""

    chunk: jax.Array
    begin: jax.Array
    end: jax.Array
    bits: jax.Array
    source: jax.Array
    target: jax.Array

    @classmethod
    def of(cls, ragged: RaggedBatch, chunks: int, slots: Slots) -> "Segments":
        """The segments of a batch's prefill rows; N = chunks + S + 1.

        Some are empty: where cuts coincide, and at the end. A grid step must name its slots even if
        it has no use for them. Naming those of an earlier step again moves nothing.
        """
        read_slots, write_slots = slots
        starts, last = ragged.query_start_loc, ragged.num_rows_padded - 1
        row = jnp.arange(starts.shape[0], dtype=jnp.int32)
        is_cut = (row >= ragged.counts[0]) & (row <= ragged.counts[1])
        total = chunks * CHUNK
        whole = jnp.arange(chunks, dtype=jnp.int32) * CHUNK
        begin = jnp.sort(jnp.concatenate([whole, jnp.where(is_cut, starts, total)]))
        end = jnp.append(begin[1:], jnp.int32(total))
        row = jnp.searchsorted(starts[1:], begin, side="right").astype(jnp.int32)
        valid = (row >= ragged.counts[0]) & (row < ragged.counts[1]) & (begin < end)
        row = jnp.minimum(row, last)
        chunk = jnp.minimum(begin // CHUNK, chunks - 1)
        opens = jnp.append(jnp.ones(1, bool), chunk[1:] != chunk[:-1])
        has_state = ragged.has_state[row]
        nothing = ragged.counts[1] == ragged.counts[0]
        bits = (
            jnp.where(valid, VALID, 0)
            + jnp.where(begin == starts[row], FIRST, 0)
            + jnp.where(has_state, 0, FRESH)
            + jnp.where(opens, OPENS, 0)
            + jnp.where(nothing, NOTHING, 0)
            + jnp.where(end == starts[row + 1], LAST, 0)
        )
        index = jnp.arange(begin.shape[0], dtype=jnp.int32)
        reader = lax.cummax(jnp.where(valid & has_state, index, -1))
        source = jnp.where(reader >= 0, read_slots[row[jnp.maximum(reader, 0)]], 0)
        writer = lax.cummax(jnp.where(valid, index, -1))
        # Before the first row: the slot that this row will write.
        first = jnp.minimum(ragged.counts[0], last)
        row = jnp.where(writer >= 0, row[jnp.maximum(writer, 0)], first)
        target = jnp.where(nothing, 0, write_slots[row])
        offset = chunk * CHUNK
        return cls(chunk, begin - offset, end - offset, bits, source, target)


# Of a segment: the part (begin, end) of the chunk, refs of the parts, gates, out, state.
SegmentBody = Callable[..., None]


def prefill(
    body: SegmentBody,
    operands: Sequence[jax.Array],
    gates: jax.Array | None,
    state: jax.Array,
    state_block: tuple[int, ...],
    ragged: RaggedBatch,
    slots: Slots,
    *,
    name: str,
    heads: int,
    vmem_limit: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Runs a kernel over the prefill rows of a batch; other rows touch no slot.

    A row's state is fetched from its read slot, stays in VMEM while the row lasts, and leaves for
    its write slot.

    Args:
        body: computes one segment for one block of heads, from refs in VMEM: the block's part of
            every operand [C, n], gates [1, C, m] if any, out [C, heads * dv], which keeps what
            tokens of other segments have put there, and the running state f32[1, *state_block],
            which is updated in place.
        operands: [T, H, d] each, of value heads or of the key heads that serve them; the last has
            the shape and dtype of the output.
        gates: [blocks, T, m], see `gates_by_block`, or None.
        state: f32[slots, ...].
        state_block: the shape of a head block's part of one slot; it is cut along one axis.
        slots: the slots to read and to write, i32[S] each.
        name: of the kernel.
        heads: value heads per grid step, see `tpu_chip.head_block`.
        vmem_limit: bytes of VMEM that the kernel may use.
        interpret: as for `pl.pallas_call`.

    Returns:
        out [T, Hv, dv], 0 for tokens outside prefill rows, and the new `state`.
    """
    num_tokens, v_heads, dv = operands[-1].shape
    blocks = v_heads // heads
    flat = [x.reshape(num_tokens, -1) for x in operands]
    more = [] if gates is None else [gates]
    missing = max(CHUNK - num_tokens, 0)
    if missing:
        flat = [jnp.pad(x, ((0, missing), (0, 0))) for x in flat]
        more = [jnp.pad(x, ((0, 0), (0, missing), (0, 0))) for x in more]
    segments = Segments.of(ragged, pl.cdiv(num_tokens, CHUNK), slots)

    def part(x: jax.Array) -> pl.BlockSpec:
        shape, index = head_part(x, blocks)
        return pl.BlockSpec((CHUNK, shape), lambda j, i, chunk, *_: (chunk[i], index(j)))

    def slot(which: int) -> pl.BlockSpec:
        cut = [part != whole for part, whole in zip(state_block, state.shape[1:], strict=True)]
        return pl.BlockSpec(
            (1, *state_block),
            lambda j, i, *scalars: (scalars[which][i], *(j if axis else 0 for axis in cut)),
        )

    out, state = pl.pallas_call(
        functools.partial(_kernel, body),
        name=name,
        out_shape=(
            jax.ShapeDtypeStruct(flat[-1].shape, flat[-1].dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(segments),
            grid=(blocks, segments.chunk.shape[0]),
            in_specs=[
                *(part(x) for x in operands),
                *(
                    pl.BlockSpec((1, CHUNK, x.shape[2]), lambda j, i, chunk, *_: (j, chunk[i], 0))
                    for x in more
                ),
                slot(4),
            ],
            out_specs=(part(operands[-1]), slot(5)),
        ),
        input_output_aliases={len(segments) + len(flat) + len(more): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit
        ),
        interpret=interpret,
    )(*segments, *flat, *more, state)
    return out[:num_tokens].reshape(num_tokens, v_heads, dv), state


def _kernel(body: SegmentBody, chunk, begin, end, bits, source, target, *refs) -> None:
    """One segment, for one block of heads. SMEM: `Segments`. VMEM: parts, gates, before, out,
    after. `after` holds the running state: its block stays while the row lasts.
    """
    del chunk, source, target  # used by the index maps
    *operands, before, out, after = refs
    i = pl.program_id(1)
    what = bits[i]

    def is_set(bit: int) -> jax.Array:
        return (what & bit) != 0

    @pl.when(is_set(OPENS))
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when(is_set(VALID) & is_set(FIRST))
    def _() -> None:
        # Selected, since the slot may hold anything.
        after[...] = jnp.where(is_set(FRESH), 0.0, before[...])

    # Without prefill rows the null slot is written, with what it held.
    @pl.when((i == 0) & is_set(NOTHING))
    def _() -> None:
        after[...] = before[...]

    @pl.when(is_set(VALID))
    def _() -> None:
        body((begin[i], end[i]), *operands, out, after)


def products(dtype: Any) -> Callable[..., jax.Array]:
    """Matrix product with float32 sums, of operands rounded to `dtype`."""
    precision = lax.Precision.HIGHEST if dtype == F32 else lax.Precision.DEFAULT

    def dot(
        a: jax.Array, b: jax.Array, *, transpose_lhs: bool = False, transpose_rhs: bool = False
    ) -> jax.Array:
        axes = ((0 if transpose_lhs else 1,), (1 if transpose_rhs else 0,))
        return lax.dot_general(
            a.astype(dtype), b.astype(dtype), (axes, ((), ())), precision=precision,
            preferred_element_type=F32,
        )  # fmt: skip

    return dot


class Decay(NamedTuple):
    """The decays of a chunk, per head: since it began, between tokens, and until it ends."""

    growth: jax.Array  # f32[C, heads] e^(total_i)
    ratio: list[jax.Array]  # per head f32[C, C] e^(total_i - total_j) for j <= i, else 0
    rest: jax.Array  # f32[C, heads] e^(total_last - total_i)
    whole: jax.Array  # f32[1, heads] e^(total_last)

    @classmethod
    def of(cls, g: jax.Array) -> "Decay":
        """From log decays g [C, heads]."""
        row = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0)
        column = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)
        lower = row >= column
        total = products(F32)(lower.astype(F32), g)  # log decay since the chunk began
        total_t, last = total.T, total[CHUNK - 1 :]
        ratio = [
            jnp.exp(jnp.where(lower, total[:, h : h + 1] - total_t[h : h + 1], NEVER))
            for h in range(g.shape[1])
        ]
        return cls(jnp.exp(total), ratio, jnp.exp(last - total), jnp.exp(last))
