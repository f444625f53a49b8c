"""Paged attention on TPU: which calls the kernels take, and the kernels in their order."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import storage, tpu_chip
from pallas_kernels.paged_attention import tpu_decode, tpu_prefill, tpu_write
from pallas_kernels.paged_attention.pages import pack, pages_shape, share_rows
from pallas_kernels.paged_attention.tpu_layout import LANES, Options
from pallas_kernels.paged_attention.tpu_prefill_layout import PrefillLayout
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import ArrayFacts, Facts

SMEM_LIMIT = 768 << 10  # of 1 MiB
# Of the pages, and of the queries that go with them.
QUERIES = {
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float8_e4m3fn": "bfloat16",
    "int8": "bfloat16",
}


def refuses(facts: Facts) -> str | None:
    """Why this implementation cannot run, or None."""
    if (reason := tpu_chip.refuses(facts)) is not None:
        return reason
    q, k, pages, table = (facts.values[name] for name in ("q", "k", "pages", "table"))
    if pages.dtype not in QUERIES:
        return f"pages must be {', '.join(QUERIES)}, not {pages.dtype}"
    if q.dtype != QUERIES[pages.dtype]:
        return f"q must be {QUERIES[pages.dtype]} for pages of {pages.dtype}, not {q.dtype}"
    num_pages, size, rows, lanes = pages.shape
    expected = pages_shape(num_pages, size, k.shape[1], k.shape[2], "tpu")
    if pages.shape != expected:
        return f"pages are {pages.shape}, and {expected} on TPU: XLA would copy them for the kernel"
    packing = 4 // jnp.dtype(pages.dtype).itemsize
    if packing == 4 and (rows == 2 or (rows % 32 == 0 and lanes > LANES)):
        return f"XLA tiles {pages.dtype} pages {pages.shape} in another way, and would copy them"
    if size * rows * (lanes // LANES) % (8 * packing):
        return f"a page of {size} tokens is not whole tiles of {8 * packing} rows"
    if (needed := 4 * table.shape[0] * table.shape[1]) > SMEM_LIMIT:
        return f"the table needs {needed >> 10} KiB of scalar memory, of {SMEM_LIMIT >> 10}"
    if not facts.values["decode_only"] and size & (size - 1):
        return f"prefill wants pages of a power of two of tokens, not {size}"
    limit = tpu_chip.CHIPS[facts.device_kind].vmem_limit
    heads = _heads(k.shape[1], rows)
    q = ArrayFacts((q.shape[0], q.shape[1] // k.shape[1] * heads, lanes), q.dtype)
    needed = tpu_decode.vmem_bytes(q, pages, table, heads, facts.values["window"])
    if not facts.values["decode_only"]:
        needed = max(needed, PrefillLayout.of(q, pages, table, heads, limit).vmem_bytes)
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
    """See `api.paged_attention`; `interpret` as in `pl.pallas_call`.

    The kernels know rows of pages only, [T, N, L] of queries and output: heads that fill up tiles
    see zeros. Where K and V share a row, a query has zeros where V is, and the output is what lies
    there.
    """
    num_tokens, num_heads, dim = q.shape
    rows, lanes = pages.shape[2:]
    kv_heads = _heads(k.shape[1], rows)
    kv = jnp.stack([k, v], axis=2).reshape(num_tokens, 2 * k.shape[1], dim)
    kv = storage.encode(pack(kv, rows, lanes), pages.dtype)
    pages = tpu_write.write(kv, pages, table, ragged, interpret=interpret)

    more_heads = num_heads // k.shape[1] * kv_heads - num_heads
    q = jnp.pad(q, ((0, 0), (0, more_heads), (0, lanes - dim)))
    sinks = None if sinks is None else jnp.pad(sinks, (0, more_heads))
    options = Options(scale, window, softcap, sinks is not None, kv_heads)
    padded = ragged.num_rows_padded
    out = tpu_decode.decode(q[:padded], pages, table, ragged, sinks, options, interpret=interpret)
    if not ragged.decode_only:
        limit = tpu_chip.current().vmem_limit
        out = tpu_prefill.prefill(
            q, out, pages, table, ragged, sinks, options, vmem_limit=limit, interpret=interpret
        )
    first = lanes // 2 if share_rows(rows, k.shape[1]) else 0
    return out[:, :num_heads, first : first + dim], pages


def _heads(kv_heads: int, rows: int) -> int:
    """KV heads of pages with so many rows per token, at least those of the model."""
    return rows if share_rows(rows, kv_heads) else rows // 2
