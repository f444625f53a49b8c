"""The gated delta rule in plain JAX: the definition of correct, and the path on CPU.

Per value head, with state S[dk, dv], decay e^g and write strength beta:

    S <- e^g S;  S <- S + k (x) beta (v - S^T k);  o = S^T q

Everything is computed in float32. Letters: T tokens, S rows, C chunk, Hk key heads, Hv value heads.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged import RaggedBatch

F32 = jnp.float32
BASE = 8  # width of the triangular blocks that are inverted row by row
CHUNK = 64  # tokens per matrix product in prefill
UNROLL = 8  # chunks per loop turn in `chunked`


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial: jax.Array | None = None,
    *,
    scale: float | None = None,
    l2norm: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """One sequence, token by token. Differentiable; batch it with `jax.vmap`.

    Args:
        q: [T, Hk, dk] queries.
        k: [T, Hk, dk] keys; key head j serves value heads [j * Hv / Hk, (j + 1) * Hv / Hk).
        v: [T, Hv, dv] values.
        g: [T, Hv] log decay, <= 0.
        beta: [T, Hv] write strength.
        initial: f32[Hv, dk, dv] state before the first token; None: zeros.
        scale: factor on q; None: dk ** -0.5.
        l2norm: normalise q and k per head (before the scale).

    Returns:
        out [T, Hv, dv] in the dtype of v, and the final state f32[Hv, dk, dv].
    """
    q, k = prepare(q, k, v.shape[-2], scale=scale, l2norm=l2norm)
    state = zeros_like_state(k, v) if initial is None else initial.astype(F32)

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        out, state = token_update(state, *token)
        return state, out

    final, out = lax.scan(step, state, (q, k, v.astype(F32), g.astype(F32), beta.astype(F32)))
    return out.astype(v.dtype), final


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial: jax.Array | None = None,
    chunk: int = 64,
    *,
    scale: float | None = None,
    l2norm: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The same function as `recurrent`, in matrix products over `chunk` tokens at a time.

    `chunk` must be a power of two. Arguments and results are those of `recurrent`.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk must be a power of two, got {chunk}")
    num_tokens = v.shape[0]
    q, k = prepare(q, k, v.shape[-2], scale=scale, l2norm=l2norm)
    state = zeros_like_state(k, v) if initial is None else initial.astype(F32)

    def split(x: jax.Array) -> jax.Array:  # [T, H, ...] -> [T / C, H, C, ...]
        # Padding tokens have beta 0 and g 0: they leave the state as it is.
        pad = [(0, -num_tokens % chunk)] + [(0, 0)] * (x.ndim - 1)
        x = jnp.pad(x.astype(F32), pad)
        return jnp.swapaxes(x.reshape(-1, chunk, *x.shape[1:]), 1, 2)

    q, k, values, g, beta = (split(x) for x in (q, k, v, g, beta))
    decay, inverse, scores = jax.vmap(within_chunk)(q, k, g, beta)

    def step(state: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        out, state = across_chunks(state, *block)
        return state, out

    # Unrolled, since XLA:CPU runs the loop's gradient at a third of the speed.
    blocks = (q, k, values, beta, decay, inverse, scores)
    final, out = lax.scan(step, state, blocks, unroll=max(1, min(UNROLL, q.shape[0])))
    out = jnp.swapaxes(out, 1, 2).reshape(-1, *v.shape[1:])
    return out[:num_tokens].astype(v.dtype), final


def prepare(
    q: jax.Array, k: jax.Array, num_v_heads: int, *, scale: float | None, l2norm: bool
) -> tuple[jax.Array, jax.Array]:
    """q and k [..., Hk, dk] -> f32[..., Hv, dk]: normalised, q scaled, heads repeated."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = q.astype(F32), k.astype(F32)
    if l2norm:
        q, k = (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    repeats = num_v_heads // k.shape[-2]
    return jnp.repeat(q * factor, repeats, axis=-2), jnp.repeat(k, repeats, axis=-2)


def zeros_like_state(k: jax.Array, v: jax.Array) -> jax.Array:
    """f32[Hv, dk, dv] zeros for k [..., dk] and v [..., Hv, dv]."""
    return jnp.zeros((v.shape[-2], k.shape[-1], v.shape[-1]), F32)


def token_update(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token: state [Hv, dk, dv], q and k [Hv, dk], v [Hv, dv], g and beta [Hv], all float32.

    Returns out [Hv, dv] and the new state. The output is taken from the old state,
    S'^T q = e^g S^T q + (k . q) delta, so that the state is read once for both products.
    """
    decay = jnp.exp(g)[:, None]
    old_k, old_q = (jnp.sum(state * x[:, :, None], axis=1) for x in (k, q))
    delta = beta[:, None] * (v - decay * old_k)
    out = decay * old_q + jnp.sum(q * k, axis=-1, keepdims=True) * delta
    return out, decay[:, :, None] * state + k[:, :, None] * delta[:, None, :]


def within_chunk(
    q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a chunk needs that does not depend on the state. q, k [Hv, C, dk]; g, beta [Hv, C].

    Returns the cumulative log decay [Hv, C], the inverse of I + A [Hv, C, C] with
    A[i, j] = beta_i e^(decay_i - decay_j) k_i . k_j for j < i, and the decayed scores q_i . k_j.
    """
    decay = jnp.cumsum(g, axis=-1)
    size = g.shape[-1]
    lower = jnp.tril(jnp.ones((size, size), bool))[None]
    # Selected before the exponential: above the diagonal the difference may overflow it.
    ratio = jnp.exp(jnp.where(lower, decay[:, :, None] - decay[:, None, :], -jnp.inf))
    below = jnp.where(jnp.eye(size, dtype=bool)[None], 0.0, ratio * beta[:, :, None])
    inverse = unit_lower_inverse(below * jnp.einsum("hid,hjd->hij", k, k))
    return decay, inverse, ratio * jnp.einsum("hid,hjd->hij", q, k)


def across_chunks(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    decay: jax.Array,
    inverse: jax.Array,
    scores: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Carries state [Hv, dk, dv] over one chunk: v [Hv, C, dv], the rest as in `within_chunk`.

    Returns out [Hv, C, dv] and the state after the chunk.
    """
    growth = jnp.exp(decay)[:, :, None]
    delta = inverse @ (beta[:, :, None] * (v - growth * (k @ state)))
    out = growth * (q @ state) + scores @ delta
    rest = jnp.exp(decay[:, -1:] - decay)[:, :, None]
    new = jnp.einsum("hid,hiv->hdv", k, rest * delta)
    return out, jnp.exp(decay[:, -1])[:, None, None] * state + new


@jax.custom_jvp
def unit_lower_inverse(strict: jax.Array) -> jax.Array:
    """Inverse of I + A for strictly lower triangular A [H, C, C], C a power of two.

    Forward substitution inverts small diagonal blocks, which are then merged pairwise:
    [[P, 0], [B, Q]]^-1 = [[P^-1, 0], [-Q^-1 B P^-1, Q^-1]]. Unlike a series in powers of A, which
    explodes when keys repeat, this is as accurate as forward substitution.
    """
    heads, size, _ = strict.shape
    width = min(BASE, size)
    inverse = _substitute(_diagonal_blocks(strict, width))
    while width < size:
        count = size // (2 * width)
        below = _diagonal_blocks(strict, 2 * width)[:, :, width:, :width]
        pairs = inverse.reshape(heads, count, 2, width, width)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        corner = -(second @ below @ first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverse.reshape(heads, size, size)


def _diagonal_blocks(matrix: jax.Array, width: int) -> jax.Array:
    """[H, C, C] -> [H, C / width, width, width]."""
    starts = range(0, matrix.shape[-1], width)
    return jnp.stack([matrix[:, i : i + width, i : i + width] for i in starts], axis=1)


def _substitute(strict: jax.Array) -> jax.Array:
    """Inverse of I + A for small strictly lower triangular blocks [..., w, w], row by row."""
    width = strict.shape[-1]
    eye = jnp.eye(width, dtype=strict.dtype)
    rows: list[jax.Array] = []
    for i in range(width):
        row = jnp.broadcast_to(eye[i], strict.shape[:-1][:-1] + (width,))
        for j, solved in enumerate(rows):
            row = row - strict[..., i, j, None] * solved
        rows.append(row)
    return jnp.stack(rows, axis=-2)


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(*primals)
    return inverse, -(inverse @ tangents[0] @ inverse)


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    ragged: RaggedBatch,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *,
    scale: float | None,
    l2norm: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `api.gated_delta_rule`."""
    dtype = v.dtype
    q, k = prepare(q, k, v.shape[1], scale=scale, l2norm=l2norm)
    tokens = (q, k, v.astype(F32), g, beta)
    # Row s with earlier tokens starts from its slot; -1 stands for zeros.
    sources = jnp.where(ragged.has_state, read_slots, -1)
    out = jnp.zeros(v.shape, F32)
    out, state = _decode(out, state, tokens, ragged.counts[0], sources, write_slots)
    if not ragged.decode_only:
        out, state = _prefill(out, state, tokens, ragged, sources, write_slots)
    return out.astype(dtype), state


def _read(state: jax.Array, source: jax.Array) -> jax.Array:
    """f32[Hv, dk, dv]: a slot's state, or zeros for source -1."""
    row = lax.dynamic_index_in_dim(state, jnp.maximum(source, 0), keepdims=False)
    return jnp.where(source >= 0, row, jnp.zeros_like(row))


def _decode(
    out: jax.Array,
    state: jax.Array,
    tokens: tuple[jax.Array, ...],
    count: jax.Array,
    sources: jax.Array,
    write_slots: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Rows [0, count), one token each. A loop, since a row's state (megabytes) fits the cache."""

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, state = carry
        token = (lax.dynamic_index_in_dim(x, i, keepdims=False) for x in tokens)
        row_out, row_state = token_update(_read(state, sources[i]), *token)
        out = lax.dynamic_update_index_in_dim(out, row_out, i, 0)
        return out, lax.dynamic_update_index_in_dim(state, row_state, write_slots[i], 0)

    return lax.fori_loop(0, count, body, (out, state))


def _prefill(
    out: jax.Array,
    state: jax.Array,
    tokens: tuple[jax.Array, ...],
    ragged: RaggedBatch,
    sources: jax.Array,
    write_slots: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Prefill rows, a chunk at a time; between chunks the state lives in the write slot."""
    num_tokens = out.shape[0]
    blocks = ragged.prefill_blocks(CHUNK)
    # A chunk may reach past the last token.
    padded = (jnp.pad(x, [(0, CHUNK)] + [(0, 0)] * (x.ndim - 1)) for x in (out, *tokens))
    out, *operands = padded
    index = jnp.arange(CHUNK, dtype=jnp.int32)

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, state = carry
        row, start, length, nth = blocks.block(i)
        inside = index < length

        def load(x: jax.Array) -> jax.Array:  # [T, Hv, ...] -> [Hv, C, ...], zeros past the block
            x = lax.dynamic_slice_in_dim(x, start, CHUNK)
            mask = inside.reshape(CHUNK, *[1] * (x.ndim - 1))
            return jnp.swapaxes(jnp.where(mask, x, jnp.zeros_like(x)), 0, 1)

        q, k, v, g, beta = (load(x) for x in operands)
        before = _read(state, jnp.where(nth == 0, sources[row], write_slots[row]))
        decay, inverse, scores = within_chunk(q, k, g, beta)
        new, after = across_chunks(before, q, k, v, beta, decay, inverse, scores)
        # Past the block `new` is 0 or belongs to rows that come later in the loop.
        out = lax.dynamic_update_slice_in_dim(out, jnp.swapaxes(new, 0, 1), start, 0)
        return out, lax.dynamic_update_index_in_dim(state, after, write_slots[row], 0)

    out, state = lax.fori_loop(0, blocks.total, body, (out, state))
    return out[:num_tokens], state
