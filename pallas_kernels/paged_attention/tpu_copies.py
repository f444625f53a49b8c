"""Copies of pages from HBM to VMEM, one per page, for K and V of all heads."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_layout import F32, Layout


def start_block(
    pages: Any, table: Any, buffer: Any, sems: Any, slot: jax.Array,
    base: jax.Array, column: jax.Array, count: jax.Array, layout: Layout, width: int, ring: bool,
) -> None:  # fmt: skip
    """Starts the copies of at most a block of `count` pages: row `base` of the table, of `width`.

    They begin at logical page `column`; if the table is a `ring`, this may be beyond its width.
    """
    if ring:
        column = lax.rem(column, width)

    def start(i: int | jax.Array) -> None:
        at = column + i
        if ring:
            at = jnp.where(at >= width, at - width, at)
        pltpu.make_async_copy(pages.at[table[base + at]], buffer.at[slot, i], sems.at[slot]).start()

    @pl.when(count >= layout.block)
    def _() -> None:
        for i in range(layout.block):
            start(i)

    @pl.when(count < layout.block)
    def _() -> None:
        lax.fori_loop(0, count, lambda i, _: start(i), None)


def forget(filled: Any, layout: Layout) -> None:
    """At first, any page of a slot may hold anything."""
    for slot in range(filled.shape[0]):
        filled[slot] = layout.block


def wait_block(
    buffer: Any, filled: Any, sems: Any, slot: jax.Array, count: jax.Array, layout: Layout
) -> None:
    """Waits for the copies of the first `count` pages of a block, and zeroes the others.

    They may be NaN, in what another row left there, and a weight of zero does not remove it. From
    page `filled[slot]` on they are zero already.
    """

    @pl.when(count == layout.block)
    def _() -> None:
        pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], sems.at[slot]).wait()

    @pl.when(count < layout.block)
    def _() -> None:
        def wait(i: jax.Array, _: None) -> None:
            pltpu.make_async_copy(buffer.at[slot, i], buffer.at[slot, i], sems.at[slot]).wait()

        def clear(i: jax.Array, _: None) -> None:
            buffer[slot, i] = jnp.zeros(buffer.shape[2:], buffer.dtype)

        lax.fori_loop(0, count, wait, None)
        lax.fori_loop(count, filled[slot], clear, None)

    filled[slot] = count


def clear_unseen(
    buffer: Any, slot: jax.Array, count: jax.Array, low: jax.Array, high: jax.Array, layout: Layout
) -> None:
    """Zeroes what lies outside tokens [low, high) in a block's first and last page: it may be NaN.

    `low` and `high` count from the first token of the block, which has `count` pages.
    """
    cuts = ((jnp.int32(0), low > 0), (count - 1, high < count * layout.page_size))
    for page, cut in cuts:

        @pl.when(cut)
        def _(page: jax.Array = page) -> None:
            shape = (layout.page_rows, layout.lanes)
            row = lax.broadcasted_iota(jnp.int32, shape, 0) + page * layout.page_rows
            seen = (row >= low * layout.token_rows) & (row < high * layout.token_rows)
            kept = jnp.where(seen, buffer[slot, page].astype(F32), 0.0)
            buffer[slot, page] = kept.astype(buffer.dtype)
