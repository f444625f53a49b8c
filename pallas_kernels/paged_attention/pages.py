"""How K and V of a token lie in a page: the shape of pools, and the way into it and out of it.

Everywhere but on TPU a token has a row of H values for each K and each V. TPUs move and multiply
whole vectors of 128 lanes and tiles of 8 rows, and XLA would lay a pool of other rows out with the
page number along the lanes, and copy all of it for a kernel. So on TPU the pool itself has whole
ones: K and V of a head share a row if they fit, and what is missing is filled up with zeros.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import platform as platform_
from pallas_kernels import storage
from pallas_kernels.tpu_chip import LANES, SUBLANES


def pages_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, platform: str | None = None
) -> tuple[int, int, int, int]:
    """Shape [P, G, R, L] of one layer's pages on `platform` (default: the current one).

    R is 2K and L is H, K of head j at row 2j and V at row 2j + 1. On TPU, L is H up to the next
    multiple of 128; heads of at most 64, if there are several, have K and V in one row, V from
    lane 64 on, so that R is K; and R goes up to 2, 4 or a multiple of 8. What this adds holds 0.

    K and V of a token are neighbours, so one copy moves both. A cut of the third axis into as many
    parts as divide K is a cut by head, unless R went up.
    """
    rows, lanes = 2 * num_kv_heads, head_dim
    platform = platform_.current().platform if platform is None else platform
    if platform == "tpu":
        if 2 * head_dim <= LANES and num_kv_heads > 1:
            rows = num_kv_heads
        rows += -rows % (SUBLANES if rows > 4 else 2)
        lanes += -lanes % LANES
    return (num_pages, page_size, rows, lanes)


def share_rows(num_rows: int, num_kv_heads: int) -> bool:
    """Whether K and V of a head share one of the `num_rows` rows of a token."""
    return num_rows < 2 * num_kv_heads


def pack(kv: jax.Array, num_rows: int, lanes: int) -> jax.Array:
    """K and V [..., 2K, H], K of head j at row 2j and V at 2j + 1, as in pages [..., R, L]."""
    outer, rows = kv.shape[:-2], kv.shape[-2]
    shared = share_rows(num_rows, rows // 2)
    kv = _fill(kv, -1, lanes // 2 if shared else lanes)
    return _fill(kv.reshape(*outer, rows // 2 if shared else rows, lanes), -2, num_rows)


def unpack(pages: jax.Array, num_kv_heads: int, head_dim: int) -> jax.Array:
    """Undoes `pack`: pages [..., R, L] -> K and V [..., 2K, H]."""
    outer, (rows, lanes) = pages.shape[:-2], pages.shape[-2:]
    if share_rows(rows, num_kv_heads):
        pages = pages.reshape(*outer, 2 * rows, lanes // 2)
    return pages[..., : 2 * num_kv_heads, :head_dim]


def _fill(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Zeros at the end of an axis, up to `size`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths) if size > x.shape[axis] else x


def nothing(dtype: np.dtype) -> int | float:
    """0, as a Triton kernel says it of what it does not load from pages.

    Triton casts no integer to float8, and the interpreter no float to int8.
    """
    return 0 if dtype == storage.INT8 else 0.0
