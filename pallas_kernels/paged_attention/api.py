"""The call that layers make: checks shapes, selects an implementation, runs it."""

import jax

from pallas_kernels import registry
from pallas_kernels.checks import (
    check_float32,
    check_floating,
    check_int32,
    check_pool,
    check_shapes,
)
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.pages import pages_shape
from pallas_kernels.paged_attention.scales import run_scaled
from pallas_kernels.ragged import RaggedBatch

OP = "paged_attention"
registry.register(OP, registry.REFERENCE, reference.paged_attention, registry.never)
registry.register_kernel(OP, "mosaic_tpu", "tpu", f"{__package__}.mosaic_tpu:paged_attention")
registry.register_kernel(OP, "triton_gpu", "gpu", f"{__package__}.triton_gpu:paged_attention")


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    ragged: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes K and V of this step's tokens into `pages`, then attends causally within each row.

    Position p of row s lives in page `table[s, (p // G) % M]` at offset p % G. With a window the
    table is a ring: M * G must be at least window - 1 plus the row's tokens in this step, rounded
    up to pages plus one. Without a window M * G must hold the whole sequence. Padding tokens write
    nothing, or to page 0, the null page. Whatever lies in pages beyond a row's tokens is never
    used, NaN included.

    Args:
        q: [T, N, H] queries; query head n reads KV head n // (N / K).
        k: [T, K, H] keys.
        v: [T, K, H] values.
        pages: [P, G, R, L], see `pages_shape`; dtype `storage.storage_dtype` of what the values
            shall be rounded to: of floating point, or int8. Donate it to the surrounding jit to
            update it in place.
        table: i32[S, M] page ids, 0 where the row has no page.
        ragged: row boundaries.
        scale: factor on the scores.
        window: token q sees positions p with q - window < p <= q. None: all p <= q.
        softcap: scores become softcap * tanh(scores / softcap), before the mask.
        sinks: f32[N] one extra logit per head in the softmax's denominator, without a value.
        k_scale, v_scale: f32[K], positive: pages hold K and V divided by these, rounded to nearest
            and, in float8 and int8, saturated. None: 1.
        implementation: a registered name; None: as `registry.forcing` says, or as it chooses.

    Returns:
        out [T, N, H] in the dtype of q (0 for padding tokens; computed in float32), and `pages`.
    """
    _check(q, k, v, pages, table, ragged, window, softcap, sinks)
    _check_scales(k.shape[1], k_scale=k_scale, v_scale=v_scale)
    facts = registry.Facts.of(
        q=q, k=k, v=v, pages=pages, table=table, decode_only=ragged.decode_only,
        window=window, softcap=softcap, sinks=sinks is not None,
    )  # fmt: skip
    run = registry.select(OP, facts, implementation).fn
    return run_scaled(
        run, q, k, v, pages, table, ragged, k_scale=k_scale, v_scale=v_scale,
        scale=scale, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    ragged: RaggedBatch,
    window: int | None,
    softcap: float | None,
    sinks: jax.Array | None,
) -> None:
    if q.ndim != 3 or k.ndim != 3 or pages.ndim != 4 or table.ndim != 2:
        raise ValueError(
            f"{OP}: q and k must be [T, heads, dim], pages [P, G, R, L] and table [S, M], "
            f"got {q.shape}, {k.shape}, {pages.shape}, {table.shape}"
        )
    num_tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    if not kv_heads or q_heads % kv_heads:
        raise ValueError(f"{OP}: {q_heads} query heads are not a multiple of {kv_heads} KV heads")
    num_pages, page_size = pages.shape[:2]
    layouts = [
        pages_shape(num_pages, page_size, kv_heads, dim, platform)
        for platform in (None, "cpu", "tpu")
    ]
    expected = {
        "k": (k, (num_tokens, kv_heads, dim)),
        "v": (v, (num_tokens, kv_heads, dim)),
        "pages": (pages, pages.shape if pages.shape in layouts else layouts[0]),
        "table": (table, (ragged.num_rows_padded, table.shape[1])),
    }
    if sinks is not None:
        expected["sinks"] = (sinks, (q_heads,))
    check_shapes(OP, expected)
    check_int32(OP, table=table)
    check_floating(OP, q=q, k=k, v=v)
    check_pool(OP, "pages", pages, int8=True)
    if window is not None and window < 1:
        raise ValueError(f"{OP}: window must be at least 1, got {window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{OP}: softcap must be positive, got {softcap}")
    ragged.check(num_tokens, OP)


def _check_scales(kv_heads: int, **scales: jax.Array | None) -> None:
    given = {name: scale for name, scale in scales.items() if scale is not None}
    check_shapes(OP, {name: (scale, (kv_heads,)) for name, scale in given.items()})
    check_float32(OP, **given)
