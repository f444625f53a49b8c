"""Runs a recurrence over whole sequences, or over a ragged batch from slot to slot.

An op gives its mathematics as a `Recurrence`; what is the same for all of them is here. Everything
is float32; only a pool of states may hold bfloat16. Letters: T tokens, S rows, C chunk.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import storage
from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32
CHUNK = 64  # tokens per matrix product in prefill
UNROLL = 8  # chunks per loop turn in `chunked`
Arrays = tuple[jax.Array, ...]
Step = tuple[jax.Array, jax.Array]  # out, state
State = TypeVar("State")  # a pool, or a tuple of pools with the same slots
SlotOp = Callable[..., tuple[jax.Array, State]]
"""(*tokens, state, batch, read_slots, write_slots) -> (out, state): an op's call in `api.py`."""


class Recurrence(NamedTuple):
    """The mathematics of one op. A token of zeros must leave the state as it is.

    Attributes:
        token: (state, *token) -> (out, state), for arrays without a token axis.
        within: (*chunk [C, ...]) -> parts: all of a chunk that does not depend on the state.
        across: (state, *parts) -> (out [C, ...], state).
    """

    token: Callable[..., Step]
    within: Callable[..., Arrays]
    across: Callable[..., Step]


def sequential(token: Callable[..., Step]) -> Recurrence:
    """A recurrence without a form in matrix products: its chunks go token by token."""

    def within(*tokens: jax.Array) -> Arrays:
        return tokens

    def across(state: jax.Array, *tokens: jax.Array) -> Step:
        return recurrent(token, tokens, state)

    return Recurrence(token, within, across)


def recurrent(token: Callable[..., Step], tokens: Arrays, state: jax.Array) -> Step:
    """One sequence [T, ...], token by token. Returns out [T, ...] and the final state."""

    def step(state: jax.Array, one: Arrays) -> Step:
        out, state = token(state, *one)
        return state, out

    final, out = lax.scan(step, state, tokens)
    return out, final


def chunked(op: Recurrence, tokens: Arrays, state: jax.Array, chunk: int) -> Step:
    """The same function as `recurrent`, `chunk` tokens at a time."""
    num_tokens = tokens[0].shape[0]

    def split(x: jax.Array) -> jax.Array:  # [T, ...] -> [T / C, C, ...]
        pad = [(0, -num_tokens % chunk)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, pad).reshape(-1, chunk, *x.shape[1:])

    def step(state: jax.Array, parts: Arrays) -> Step:
        out, state = op.across(state, *parts)
        return state, out

    chunks = [split(x) for x in tokens]
    unroll = max(1, min(UNROLL, chunks[0].shape[0]))
    # Unrolled, since XLA:CPU runs the loop's gradient at a third of the speed.
    final, out = lax.scan(step, state, jax.vmap(op.within)(*chunks), unroll=unroll)
    return out.reshape(-1, *out.shape[2:])[:num_tokens], final


def ragged(
    op: Recurrence,
    tokens: Arrays,
    state: jax.Array,
    batch: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    out_shape: tuple[int, ...],
    *,
    decode: bool = True,
) -> Step:
    """Every row of a batch, from its slot of `state` [slots, ...] to its slot.

    Rows without earlier tokens start from zeros. Without `decode`, decode rows are left to a
    kernel: they touch no slot. Returns out f32[T, *out_shape], 0 for padding tokens and for such
    rows, and the new `state`.
    """
    # Row s with earlier tokens starts from its slot; -1 stands for zeros.
    sources = jnp.where(batch.has_state, read_slots, -1)
    out = jnp.zeros((tokens[0].shape[0], *out_shape), F32)
    if decode:
        out, state = _decode(op, out, state, tokens, batch.counts[0], sources, write_slots)
    if not batch.decode_only:
        out, state = _prefill(op, out, state, tokens, batch, sources, write_slots)
    return out, state


def together(
    op: SlotOp[State],
    tokens: Arrays,
    state: State,
    batch: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
) -> tuple[jax.Array, State]:
    """The op on the batch as it is: one state per row is written."""
    return op(*tokens, state, batch, read_slots, write_slots)


def token_by_token(
    op: SlotOp[State],
    tokens: Arrays,
    state: State,
    batch: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
) -> tuple[jax.Array, State]:
    """The op on rows of N tokens each, in its decode form, one token of every row at a time.

    Token i of a row starts from the slot that token i - 1 wrote, the first one from the row's read
    slot, which may be its first write slot. So the state after every token stays, and taking tokens
    back is a choice of the slot to read next. The arithmetic is that of N decode steps.

    Args:
        op: the call.
        tokens: its operands [S * N, ...], row by row.
        state: pools [slots, ...]. batch: prefill rows of N tokens, then padding rows.
        read_slots: i32[S]. write_slots: i32[S, N].

    Returns:
        out [S * N, ...] and the new `state`.
    """
    rows, count = write_slots.shape
    before = batch.seq_lens - count
    num_rows = batch.counts[1]
    starts = jnp.minimum(jnp.arange(rows + 1, dtype=jnp.int32), num_rows)

    def body(state: State, one: tuple[jax.Array, ...]) -> tuple[State, jax.Array]:
        i, reads, writes, *token = one
        seq_lens = jnp.where(batch.row_valid, before + i + 1, 0)
        counts = jnp.stack([num_rows, num_rows])
        decode = RaggedBatch(starts, seq_lens, counts, decode_only=True)
        out, state = op(*token, state, decode, reads, writes)
        return state, out

    reads = jnp.concatenate([read_slots[:, None], write_slots[:, :-1]], axis=1)
    by_token = [jnp.swapaxes(x.reshape(rows, count, *x.shape[1:]), 0, 1) for x in tokens]
    index = jnp.arange(count, dtype=jnp.int32)
    state, out = lax.scan(body, state, (index, reads.T, write_slots.T, *by_token))
    return jnp.swapaxes(out, 0, 1).reshape(-1, *out.shape[2:]), state


def _read(state: jax.Array, source: jax.Array) -> jax.Array:
    """A slot's state in float32, or zeros for source -1."""
    stored = lax.dynamic_index_in_dim(state, jnp.maximum(source, 0), keepdims=False)
    row = storage.decode(stored).astype(F32)
    return jnp.where(source >= 0, row, jnp.zeros_like(row))


def _write(state: jax.Array, row: jax.Array, slot: jax.Array) -> jax.Array:
    """Puts a row's float32 state into a slot."""
    return lax.dynamic_update_index_in_dim(state, storage.encode(row, state.dtype), slot, 0)


def _decode(
    op: Recurrence,
    out: jax.Array,
    state: jax.Array,
    tokens: Arrays,
    count: jax.Array,
    sources: jax.Array,
    write_slots: jax.Array,
) -> Step:
    """Rows [0, count), one token each. A loop, since a row's state (megabytes) fits the cache."""

    def body(i: jax.Array, carry: Step) -> Step:
        out, state = carry
        token = (lax.dynamic_index_in_dim(x, i, keepdims=False) for x in tokens)
        row_out, row_state = op.token(_read(state, sources[i]), *token)
        out = lax.dynamic_update_index_in_dim(out, row_out, i, 0)
        return out, _write(state, row_state, write_slots[i])

    return lax.fori_loop(0, count, body, (out, state))


def _prefill(
    op: Recurrence,
    out: jax.Array,
    state: jax.Array,
    tokens: Arrays,
    batch: RaggedBatch,
    sources: jax.Array,
    write_slots: jax.Array,
) -> Step:
    """Prefill rows, a chunk at a time; between chunks the state lives in the write slot."""
    num_tokens = out.shape[0]
    blocks = batch.prefill_blocks(CHUNK)
    # A chunk may reach past the last token.
    padded = (jnp.pad(x, [(0, CHUNK)] + [(0, 0)] * (x.ndim - 1)) for x in (out, *tokens))
    out, *operands = padded
    index = jnp.arange(CHUNK, dtype=jnp.int32)

    def body(i: jax.Array, carry: Step) -> Step:
        out, state = carry
        row, start, length, nth = blocks.block(i)
        inside = index < length

        def load(x: jax.Array) -> jax.Array:  # [T, ...] -> [C, ...], zeros past the block
            x = lax.dynamic_slice_in_dim(x, start, CHUNK)
            mask = inside.reshape(CHUNK, *[1] * (x.ndim - 1))
            return jnp.where(mask, x, jnp.zeros_like(x))

        before = _read(state, jnp.where(nth == 0, sources[row], write_slots[row]))
        new, after = op.across(before, *op.within(*(load(x) for x in operands)))
        # Past the block `new` is 0 or belongs to rows that come later in the loop.
        out = lax.dynamic_update_slice_in_dim(out, new, start, 0)
        return out, _write(state, after, write_slots[row])

    out, state = lax.fori_loop(0, blocks.total, body, (out, state))
    return out[:num_tokens], state
