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
