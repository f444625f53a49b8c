"""Ragged batches for kernel tests, and float64 oracles that go token by token in numpy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from pallas_kernels import RaggedBatch


@dataclass(frozen=True)
class Rows:
    """A batch in plain numbers: rows of (tokens before this step, tokens in this step)."""

    decode: tuple[int, ...] = ()  # earlier tokens of each decode row
    prefill: tuple[tuple[int, int], ...] = ()
    pad_rows: int = 0
    pad_tokens: int = 0

    @property
    def all(self) -> tuple[tuple[int, int], ...]:
        """(earlier, query) per row, decode rows first."""
        return (*((n, 1) for n in self.decode), *self.prefill)

    @property
    def num_tokens(self) -> int:
        """T, padding included; a batch without prefill rows has T == S."""
        if not self.prefill and not self.pad_tokens:
            return self.num_rows
        return max(sum(n for _, n in self.all) + self.pad_tokens, self.num_rows)

    @property
    def num_rows(self) -> int:
        """S, padding included."""
        return len(self.all) + self.pad_rows

    @property
    def slices(self) -> list[slice]:
        """The tokens of each row on the flat axis."""
        ends = np.cumsum([0, *(n for _, n in self.all)])
        return [slice(int(a), int(b)) for a, b in zip(ends, ends[1:], strict=False)]

    def padded(self, num_rows: int, num_tokens: int) -> "Rows":
        """The same rows in a bucket, so that batches of one shape compile once."""
        used = sum(n for _, n in self.all)
        return replace(self, pad_rows=num_rows - len(self.all), pad_tokens=num_tokens - used)

    def ragged(self) -> RaggedBatch:
        """The batch as kernels take it; without prefill rows it is a DECODE batch."""
        starts = np.cumsum([0, *(n for _, n in self.all)] + [0] * self.pad_rows)
        lens = [a + b for a, b in self.all] + [0] * self.pad_rows
        counts = [len(self.decode), len(self.all)]
        decode_only = not self.prefill and self.num_tokens == self.num_rows
        return RaggedBatch(_i32(starts), _i32(lens), _i32(counts), decode_only)


def _i32(values: Sequence[int] | np.ndarray) -> jnp.ndarray:
    return jnp.asarray(np.asarray(values, np.int32))


def attention_oracle(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """The last len(q) tokens of one sequence: q [t, N, H], all of k and v [n, K, H]; float64."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, repeats, axis=1) for x in (k, v))
    out = np.zeros(q.shape)
    for i in range(len(q)):
        end = len(k) - len(q) + i + 1
        begin = 0 if window is None else max(0, end - window)
        scores = scale * np.einsum("nh,jnh->nj", q[i], k[begin:end])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if sinks is not None:
            scores = np.concatenate([scores, sinks[:, None]], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[i] = np.einsum("nj,jnh->nh", weights[:, : end - begin], v[begin:end])
    return out


def delta_rule_oracle(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    *,
    scale: float,
    l2norm: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence: q, k [T, Hk, dk], v [T, Hv, dv], g [T, Hv (, dk)], beta [T, Hv], state
    [Hv, dk, dv].
    """
    if l2norm:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    repeats = v.shape[1] // k.shape[1]
    q, k = (np.repeat(x, repeats, axis=1) for x in (q * scale, k))
    out = np.zeros(v.shape)
    state = state.copy()
    for t in range(len(v)):
        state *= np.exp(g[t]).reshape(len(state), -1, 1)
        memory = np.einsum("hkv,hk->hv", state, k[t])
        state += np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - memory))
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    return out, state


def delta_net_oracle(
    qkv: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    conv: np.ndarray,
    recurrent: np.ndarray,
    *,
    weight: np.ndarray,
    bias: np.ndarray | None,
    A_log: np.ndarray,
    dt_bias: np.ndarray,
    k_heads: int,
    max_beta: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One sequence: qkv [T, C], a [T, Hv (, dk)], b [T, Hv], after inputs conv [W - 1, C] and state
    recurrent [Hv, dk, dv]. Returns out and both states.
    """
    (heads, dk, _), keep = recurrent.shape, len(conv)
    inputs = np.concatenate([conv, qkv])
    mixed = convolution_oracle(inputs, weight, bias, "silu")[keep:]
    q, k, v = np.split(mixed, [k_heads * dk, 2 * k_heads * dk], axis=1)
    q, k, v = (x.reshape(len(qkv), n, -1) for x, n in ((q, k_heads), (k, k_heads), (v, heads)))
    g = -np.exp(A_log).reshape(-1, *[1] * (a.ndim - 2)) * np.logaddexp(0, a + dt_bias)
    beta = max_beta / (1 + np.exp(-b))
    out, recurrent = delta_rule_oracle(q, k, v, g, beta, recurrent, scale=dk**-0.5)
    return out, inputs[len(inputs) - keep :], recurrent


def gla_oracle(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, state: np.ndarray, *, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence: q, k [T, Hk, dk], v [T, Hv, dv], g [T, Hv (, dk)], state [Hv, dk, dv]."""
    repeats = v.shape[1] // k.shape[1]
    q, k = (np.repeat(x, repeats, axis=1) for x in (q * scale, k))
    out = np.zeros(v.shape)
    for t in range(len(v)):
        state = state * np.exp(g[t]).reshape(len(state), -1, 1)
        state = state + np.einsum("hk,hv->hkv", k[t], v[t])
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    return out, state


def ssd_oracle(
    x: np.ndarray,
    dt: np.ndarray,
    A: np.ndarray,
    B: np.ndarray,
    C: np.ndarray,
    D: np.ndarray,
    dt_bias: np.ndarray,
    state: np.ndarray,
    dt_limit: tuple[float, float],
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence: x [T, H, P], dt [T, H], B, C [T, G, N], A, D, dt_bias [H], state [N, H P]."""
    B, C = (np.repeat(w, x.shape[1] // w.shape[1], axis=1) for w in (B, C))
    out, state = np.zeros(x.shape), state.reshape(len(state), *x.shape[1:])
    for t in range(len(x)):
        step = np.clip(np.logaddexp(0, dt[t] + dt_bias), *dt_limit)
        state = np.exp(step * A)[:, None] * state
        state = state + np.einsum("hp,hn->nhp", step[:, None] * x[t], B[t])
        out[t] = np.einsum("nhp,hn->hp", state, C[t]) + D[:, None] * x[t]
    return out, state.reshape(len(state), -1)


def mamba2_oracle(
    xBC: np.ndarray,
    dt: np.ndarray,
    conv: np.ndarray,
    recurrent: np.ndarray,
    *,
    weight: np.ndarray,
    bias: np.ndarray | None,
    A_log: np.ndarray,
    D: np.ndarray,
    dt_bias: np.ndarray,
    dt_limit: tuple[float, float],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One sequence: xBC [T, C], dt [T, H], after inputs conv [W - 1, C] and state recurrent
    [N, H P]. Returns y [T, H P] and both states.
    """
    (tokens, heads), (size, inner), keep = dt.shape, recurrent.shape, len(conv)
    inputs = np.concatenate([conv, xBC])
    mixed = convolution_oracle(inputs, weight, bias, "silu")[keep:]
    x, weights = mixed[:, :inner].reshape(tokens, heads, -1), mixed[:, inner:]
    B, C = np.moveaxis(weights.reshape(tokens, 2, -1, size), 1, 0)
    y, recurrent = ssd_oracle(x, dt, -np.exp(A_log), B, C, D, dt_bias, recurrent, dt_limit)
    return y.reshape(tokens, inner), inputs[len(inputs) - keep :], recurrent


def rwkv7_oracle(
    r: np.ndarray,
    w: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence: r, w, k, a, b [T, H, dk], v [T, H, dv], state [dk, H dv]."""
    out = np.zeros(v.shape)
    shape, state = state.shape, np.swapaxes(state.reshape(-1, *v.shape[1:]), 0, 1)
    for t in range(len(v)):
        heads = []
        for h, old in enumerate(state):
            move = np.diag(np.exp(w[t, h])) + np.outer(b[t, h], a[t, h])
            heads.append(move @ old + np.outer(k[t, h], v[t, h]))
        state = np.stack(heads)
        out[t] = np.einsum("hkv,hk->hv", state, r[t])
    return out, np.swapaxes(state, 0, 1).reshape(shape)


def selective_scan_oracle(
    x: np.ndarray,
    dt: np.ndarray,
    A: np.ndarray,
    B: np.ndarray,
    C: np.ndarray,
    D: np.ndarray,
    dt_bias: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence: x, dt [T, E], B, C [T, N], D, dt_bias [E], A, state [N, E]."""
    out = np.zeros(x.shape)
    for t in range(len(x)):
        step = np.logaddexp(0, dt[t] + dt_bias)
        state = np.exp(step * A) * state + np.outer(B[t], step * x[t])
        out[t] = C[t] @ state + D * x[t]
    return out, state


def convolution_oracle(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, activation: str | None
) -> np.ndarray:
    """One whole sequence: x [T, C], weight [C, W]; float64."""
    out = np.zeros(x.shape)
    width = weight.shape[1]
    for t in range(len(x)):
        for j in range(width):
            if t - width + 1 + j >= 0:
                out[t] += weight[:, j] * x[t - width + 1 + j]
        if bias is not None:
            out[t] += bias
    return out / (1 + np.exp(-out)) if activation == "silu" else out
