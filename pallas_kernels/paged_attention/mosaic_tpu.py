"""Paged attention on TPU: which calls the kernels take, and the kernels in their order."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tpu_chip
from pallas_kernels.paged_attention import tpu_decode, tpu_prefill, tpu_write
from pallas_kernels.paged_attention.tpu_layout import LANES, Options
from pallas_kernels.paged_attention.tpu_prefill_layout import PrefillLayout
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts

SMEM_LIMIT = 768 << 10  # of 1 MiB


def refuses(facts: Facts) -> str | None:
    """Why this implementation cannot run, or None."""
    if (reason := tpu_chip.refuses(facts)) is not None:
        return reason
    q, pages, table = (facts.values[name] for name in ("q", "pages", "table"))
    if pages.dtype not in ("bfloat16", "float32"):
        return f"pages must be bfloat16 or float32, not {pages.dtype}"
    if q.dtype != pages.dtype:
        return f"q is {q.dtype} and pages are {pages.dtype}; they must be equal"
    _, size, rows, dim = pages.shape
    if dim % LANES:
        # XLA then lays the pool out with the page's number along the lanes, to save padding.
        return f"head dim {dim} is no multiple of {LANES}: XLA would copy the pool for the kernel"
    if rows not in (2, 4) and rows % 8:
        return (
            f"{rows // 2} KV heads: K and V of a token ({rows} rows) are not whole tiles of 8 rows"
        )
    packing = 4 // jnp.dtype(pages.dtype).itemsize
    if size * rows * (dim // LANES) % (8 * packing):
        return f"a page of {size} tokens is not whole tiles of {8 * packing} rows"
    if (needed := 4 * table.shape[0] * table.shape[1]) > SMEM_LIMIT:
        return f"the table needs {needed >> 10} KiB of scalar memory, of {SMEM_LIMIT >> 10}"
    if not facts.values["decode_only"] and size & (size - 1):
        return f"prefill wants pages of a power of two of tokens, not {size}"
    limit = tpu_chip.CHIPS[facts.device_kind].vmem_limit
    needed = tpu_decode.vmem_bytes(q, pages, table, facts.values["window"])
    if not facts.values["decode_only"]:
        needed = max(needed, PrefillLayout.of(q, pages, table, limit).vmem_bytes)
    if needed > limit:
        return f"blocks need {needed >> 20} MiB of vector memory, of {limit >> 20}"
    return None


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    ragged: RaggedBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: jax.Array | None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.paged_attention`; `interpret` as in `pl.pallas_call`."""
    options = Options(scale, window, softcap, sinks is not None)
    pages = tpu_write.write(k, v, pages, table, ragged, interpret=interpret)
    rows = ragged.num_rows_padded
    out = tpu_decode.decode(q[:rows], pages, table, ragged, sinks, options, interpret=interpret)
    if not ragged.decode_only:
        limit = tpu_chip.current().vmem_limit
        out = tpu_prefill.prefill(
            q, out, pages, table, ragged, sinks, options, vmem_limit=limit, interpret=interpret
        )
    return out, pages
