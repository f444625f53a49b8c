"""How Triton kernels with a state per row go over a batch: token by token.

A program has a part of one row's state. It reads that from one slot and writes it to another or the
same one, and nobody else touches it, so that the pool is updated in place.
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
from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32
Slots = tuple[jax.Array, jax.Array]  # to read, to write


Token = Callable[[jax.Array, jax.Array], jax.Array]
"""(i32[] its number, f32 a part of the state) -> the new part; it finishes its output."""


class Row(NamedTuple):
    """The row of a program. What must not be read or written is masked."""

    number: jax.Array
    real: jax.Array  # it is not padding
    continues: jax.Array  # it has earlier tokens; otherwise its slot may hold anything
    tokens: tuple[jax.Array, jax.Array] | None  # the first one, the end; None: one, of its number
    sources: Any  # refs of the slots to read and to write: loaded late, they keep no register
    targets: Any

    def read(self, state: Any, place: tuple[Any, ...], mask: jax.Array) -> jax.Array:
        """A part of the row's state, as stored; zeros if it starts from them."""
        return plgpu.load(
            state.at[self.sources[self.number], *place], mask=mask & self.continues, other=0
        )

    def write(self, state: Any, place: tuple[Any, ...], mask: jax.Array, new: jax.Array) -> None:
        """The same part of the new state."""
        value = new.astype(state.dtype)
        plgpu.store(state.at[self.targets[self.number], *place], value, mask=mask & self.real)

    def walk(
        self, before: Any, after: Any, place: tuple[Any, ...], mask: jax.Array, token: Token
    ) -> None:
        """Takes a part of the row's state over its tokens, from slot to slot."""
        old = self.read(before, place, mask).astype(F32)
        if self.tokens is None:
            new = token(self.number, old)
        else:
            new = lax.fori_loop(*self.tokens, token, old)
        self.write(after, place, mask, new)

    def finish(
        self, out: Any, token: jax.Array, place: tuple[Any, ...], mask: jax.Array, value: jax.Array
    ) -> None:
        """A part of a token's output, 0 for padding."""
        value = jnp.where(self.real, value, 0.0).astype(out.dtype)
        plgpu.store(out.at[token, *place], value, mask=mask)


class HeadColumns(NamedTuple):
    """Some columns of one head's state [slots, Hv, dk, dv], and what goes with them of a token."""

    head: jax.Array
    key_head: jax.Array  # that serves it
    channel: jax.Array  # i32[D], dk up to a power of two
    column: jax.Array  # i32[V]
    real_channel: jax.Array  # below dk
    real_column: jax.Array  # below dv

    @classmethod
    def of(cls, k: Any, state: Any, columns: int) -> "HeadColumns":
        """Those of this program of a grid (parts of columns, heads, rows); k is [T, Hk, dk]."""
        _, heads, dk, dv = state.shape
        head, channel = pl.program_id(1), jnp.arange(gpu_chip.power_of_two(dk))
        column = pl.program_id(0) * columns + jnp.arange(columns)
        key_head = lax.div(head, heads // k.shape[1])
        return cls(head, key_head, channel, column, channel < dk, column < dv)

    @property
    def place(self) -> tuple[jax.Array, ...]:
        """In a slot."""
        return self.head, self.channel[:, None], self.column[None]

    @property
    def mask(self) -> jax.Array:
        """bool[D, V]."""
        return self.real_channel[:, None] & self.real_column[None]

    def key(self, ref: Any, token: jax.Array) -> jax.Array:
        """f32[D] of queries or keys [T, Hk, dk]."""
        at = ref.at[token, self.key_head, self.channel]
        return plgpu.load(at, mask=self.real_channel, other=0.0).astype(F32)

    def value(self, ref: Any, token: jax.Array) -> jax.Array:
        """f32[V] of values [T, Hv, dv]."""
        at = ref.at[token, self.head, self.column]
        return plgpu.load(at, mask=self.real_column, other=0.0).astype(F32)

    def decay(self, g: Any, token: jax.Array) -> jax.Array:
        """f32[D, 1] of log decays [T, Hv] or [T, Hv, dk]."""
        if len(g.shape) == 3:
            at = g.at[token, self.head, self.channel]
            return jnp.exp(plgpu.load(at, mask=self.real_channel, other=0.0))[:, None]
        return jnp.exp(jnp.full(self.channel.shape, g[token, self.head]))[:, None]


# A row, its operands, before, out, after: refs in global memory.
RowBody = Callable[..., None]


def run(
    body: RowBody,
    operands: Sequence[jax.Array],
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    name: str,
    grid: tuple[int, ...],
    out: jax.ShapeDtypeStruct,
    prefill: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Runs a kernel of 128 threads a program over (*grid, rows).

    Args:
        body: computes a part of one row.
        operands: anything.
        state: [slots, ...], updated in place if it is donated.
        ragged: row boundaries.
        slots: read and write slots, i32[S] each.
        name: of the op; the kernel's says whether it is for decode rows.
        grid: programs of each row.
        out: shape and dtype of the output, [T, ...].
        prefill: take the prefill rows, too. Otherwise the first S tokens' output is 0 where they
            are no decode row's, and that of others undefined.
        interpret: as in `pl.pallas_call`.

    Returns:
        `out` and the new `state`.
    """
    arguments = (
        ragged.query_start_loc, ragged.seq_lens, ragged.counts, *slots, *operands, state
    )  # fmt: skip
    kernel, padding = (_whole_rows, 1) if prefill else (_decode_rows, 0)
    return pl.pallas_call(
        functools.partial(kernel, body, len(grid)),
        grid=(*grid, ragged.num_rows_padded + padding),
        out_shape=(out, jax.ShapeDtypeStruct(state.shape, state.dtype)),
        input_output_aliases={len(arguments) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=f"{name}_recurrent" if prefill else f"{name}_decode",
    )(*arguments)


def _decode_rows(
    body: RowBody, axis: int, starts: Any, seq_lens: Any, counts: Any, sources: Any, targets: Any,
    *refs: Any,
) -> None:  # fmt: skip
    """A part of one row, the program's index on `axis` of the grid."""
    del starts
    index = pl.program_id(axis)
    decodes = index < counts[0]
    continues = decodes & (seq_lens[index] > 1)
    body(Row(index, decodes, continues, None, sources, targets), *refs)


def _whole_rows(
    body: RowBody, axis: int, starts: Any, seq_lens: Any, counts: Any, sources: Any, targets: Any,
    *refs: Any,
) -> None:  # fmt: skip
    """The same of a row of any kind; the padding at the end of the batch is one more."""
    index, last = pl.program_id(axis), seq_lens.shape[0] - 1
    row, real, out = jnp.minimum(index, last), index < counts[1], refs[-2]
    start = starts[jnp.where(index > last, counts[1], row)]
    end = jnp.where(real, starts[row + 1], jnp.where(index > last, out.shape[0], start))
    continues = real & (seq_lens[row] > end - start)
    body(Row(row, real, continues, (start, end), sources, targets), *refs)
