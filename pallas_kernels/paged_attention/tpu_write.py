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
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    ragged: RaggedBatch,
    *,
    interpret: Any = False,
) -> jax.Array:
    """Puts K and V [T, K, H] of the decode rows into `pages`, in place."""
    kv = jnp.stack([k, v], axis=2).reshape(k.shape[0], 2 * k.shape[1], k.shape[2])
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(1,),
        in_specs=[anywhere, anywhere],
        out_specs=anywhere,
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )
    kernel = functools.partial(_write_kernel, page_size=pages.shape[1], width=table.shape[1])
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        grid_spec=grid_spec,
        input_output_aliases={4: 0},
        interpret=interpret,
        name="paged_attention_write",
    )
    return call(table.reshape(-1), ragged.seq_lens, ragged.counts, kv.astype(pages.dtype), pages)


def _write_kernel(
    table: Any, seq_lens: Any, counts: Any, kv: Any, _: Any, pages: Any, sem: Any, *,
    page_size: int, width: int,
) -> None:  # fmt: skip
    def copy(row: jax.Array) -> Any:
        position = seq_lens[row] - 1
        column = lax.rem(divide(position, page_size), width)
        page = table[row * width + column]
        offset = modulo(position, page_size)
        return pltpu.make_async_copy(kv.at[row], pages.at[page, offset], sem)

    def start(row: jax.Array, _: None) -> None:
        copy(row).start()

    def wait(row: jax.Array, _: None) -> None:
        copy(row).wait()

    lax.fori_loop(0, counts[0], start, None)
    lax.fori_loop(0, counts[0], wait, None)
