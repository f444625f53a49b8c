"""How Triton kernels with a state per row go over a batch of decode rows.

A program has a part of one row's state. It reads that from one slot and writes it to another or the
same one, and nobody else touches it, so that the pool is updated in place.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32
Slots = tuple[jax.Array, jax.Array]  # to read, to write


class Row(NamedTuple):
    """The row of a program. What must not be read or written is masked."""

    number: jax.Array
    decodes: jax.Array  # it is not padding
    continues: jax.Array  # it has earlier tokens; otherwise its slot may hold anything
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
        plgpu.store(state.at[self.targets[self.number], *place], value, mask=mask & self.decodes)

    def finish(self, out: Any, place: tuple[Any, ...], mask: jax.Array, value: jax.Array) -> None:
        """A part of the row's output, 0 for padding rows."""
        value = jnp.where(self.decodes, value, 0.0).astype(out.dtype)
        plgpu.store(out.at[self.number, *place], value, mask=mask)


# A row, its operands, before, out, after: refs in global memory.
RowBody = Callable[..., None]


def decode(
    body: RowBody,
    operands: Sequence[jax.Array],
    state: jax.Array,
    ragged: RaggedBatch,
    slots: Slots,
    *,
    name: str,
    grid: tuple[int, ...],
    out: jax.ShapeDtypeStruct,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Runs a kernel of 128 threads a program over (*grid, rows).

    Args:
        body: computes a part of one row.
        operands: anything.
        state: [slots, ...], updated in place if it is donated.
        ragged: row boundaries of a batch without prefill rows.
        slots: read and write slots, i32[S] each.
        name: of the kernel.
        grid: programs of each row.
        out: shape and dtype of the output.
        interpret: as in `pl.pallas_call`.

    Returns:
        `out` and the new `state`.
    """
    arguments = (ragged.seq_lens, ragged.counts, *slots, *operands, state)
    return pl.pallas_call(
        functools.partial(_kernel, body, len(grid)),
        grid=(*grid, ragged.num_rows_padded),
        out_shape=(out, jax.ShapeDtypeStruct(state.shape, state.dtype)),
        input_output_aliases={len(arguments) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )(*arguments)


def _kernel(
    body: RowBody, axis: int, seq_lens: Any, counts: Any, sources: Any, targets: Any, *refs: Any
) -> None:
    """A part of one row, the program's index on `axis` of the grid."""
    index = pl.program_id(axis)
    decodes = index < counts[0]
    continues = decodes & (seq_lens[index] > 1)
    body(Row(index, decodes, continues, sources, targets), *refs)
