"""Paged attention on NVIDIA GPUs: which calls the Triton kernels take."""

import math
from typing import Any

import jax

from pallas_kernels import gpu_chip
from pallas_kernels.paged_attention import gpu_decode, gpu_prefill
from pallas_kernels.paged_attention.gpu_prefill import FLOAT32_ROWS
from pallas_kernels.paged_attention.reference import Options
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import Facts

GIB = 1 << 30
BYTES = ("float8_e4m3fn", "int8")  # dtypes of pages of which kernels convert what they read
MAX_DIM = 256
MAX_GROUP = 64


def refuses(facts: Facts) -> str | None:
    """Why this implementation cannot run, or None."""
    reason = gpu_chip.refuses(facts)
    if reason is not None:
        return reason
    q, pages = facts.values["q"], facts.values["pages"]
    if q.dtype not in ("bfloat16", "float32"):
        return f"q must be bfloat16 or float32, not {q.dtype}"
    if pages.dtype not in (q.dtype, *BYTES):
        return f"pages must be {q.dtype} as q, or {' or '.join(BYTES)}, not {pages.dtype}"
    if pages.dtype == "float8_e4m3fn" and "A100" in facts.device_kind:
        return "A100 has no float8; pages in int8 take as few bytes"
    if pages.dtype in BYTES and 2 * GIB < (size := math.prod(pages.shape)) <= 4 * GIB:
        return (
            "Pallas has offsets of 32 bits up to 4 GiB, and in bytes they reach 2 GiB only; these "
            f"pages have {size / GIB:.1f} GiB"
        )
    if q.shape[2] > MAX_DIM:
        return f"head dim {q.shape[2]} is above {MAX_DIM}: its tiles would not fit registers"
    if (group := q.shape[1] * 2 // pages.shape[2]) > MAX_GROUP:
        return f"{group} query heads per KV head are above {MAX_GROUP}"
    if q.dtype == "float32" and not facts.values["decode_only"] and group > FLOAT32_ROWS:
        return f"{group} query heads per KV head are above {FLOAT32_ROWS} for float32 prefill"
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
    options = Options(scale, window, softcap)
    rest = table, ragged, sinks, options
    out, pages = gpu_decode.decode(q, k, v, pages, *rest, interpret=interpret)
    if ragged.decode_only:
        return out, pages
    return gpu_prefill.prefill(q, k, v, out, pages, *rest, interpret=interpret)
