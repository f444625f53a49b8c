"""Puts the K and V of a step into pages on TPU, in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_layout import divide, modulo
from pallas_kernels.ragged import RaggedBatch


def write(
    kv: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    ragged: RaggedBatch,
    *,
    interpret: Any = False,
) -> jax.Array:
    """Puts what `pages` hold of the tokens of all rows, [T, R, L], into them, in place."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(1,),
        in_specs=[anywhere, anywhere],
        out_specs=anywhere,
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )
    kernel = functools.partial(
        _write_kernel,
        page_size=pages.shape[1],
        width=table.shape[1],
        decode_only=ragged.decode_only,
    )
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        grid_spec=grid_spec,
        input_output_aliases={5: 0},
        interpret=interpret,
        name="paged_attention_write",
    )
    return call(
        table.reshape(-1), ragged.query_start_loc, ragged.seq_lens, ragged.counts,
        kv, pages,
    )  # fmt: skip


def _write_kernel(
    table: Any, starts: Any, seq_lens: Any, counts: Any, kv: Any, _: Any, pages: Any, sem: Any, *,
    page_size: int, width: int, decode_only: bool,
) -> None:  # fmt: skip
    def tokens(row: jax.Array, token: jax.Array, position: jax.Array, count: int) -> Any:
        """The copy of `count` tokens that lie in one page."""
        column = lax.rem(divide(position, page_size), width)
        page, offset = table[row * width + column], modulo(position, page_size)
        return pltpu.make_async_copy(
            kv.at[pl.ds(token, count)], pages.at[page, pl.ds(offset, count)], sem
        )

    def decode_row(row: jax.Array, start: bool) -> None:
        copy = tokens(row, row, seq_lens[row] - 1, 1)
        copy.start() if start else copy.wait()

    def prefill_row(row: jax.Array, start: bool) -> None:
        """A page at a time, and token by token in pages of which it has a part only."""
        stop = starts[row + 1]
        shift = seq_lens[row] - stop  # from token to position

        def some(token: jax.Array) -> jax.Array:
            position = token + shift
            whole = (modulo(position, page_size) == 0) & (token + page_size <= stop)
            copies = [(~whole, 1)]
            if page_size <= kv.shape[0]:  # otherwise no copy of a page could be described
                copies.append((whole, page_size))
            for condition, count in copies:

                @pl.when(condition)
                def _(count: int = count) -> None:
                    copy = tokens(row, token, position, count)
                    copy.start() if start else copy.wait()

            return token + jnp.where(whole, page_size, 1)

        lax.while_loop(lambda token: token < stop, some, starts[row])

    for start in (True, False):
        lax.fori_loop(0, counts[0], lambda row, _, s=start: decode_row(row, s), None)
        if not decode_only:
            lax.fori_loop(counts[0], counts[1], lambda row, _, s=start: prefill_row(row, s), None)
