"""The oracle: dense, unbatched, cache-free generation. Slow, and simple enough to be believed.

The engine's tokens are compared with it for any arrival order, chunk size and batch mates.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.loading import LoadedModel
from hybrid_jax.models.decoder import Params, bind

PAD_TO = 64  # lengths are padded (harmless: everything is causal), so that few shapes compile


def forward(
    graph: Any, params: Params, token_ids: jax.Array, *, chunked: bool = False
) -> jax.Array:
    """Logits of whole sequences: i32[B, T] -> float32[B, T, V]. Differentiable.

    `chunked` runs linear-attention layers in their parallel form, for training.
    """
    model = bind(graph, params)
    return jax.vmap(lambda ids: model.logits(model.dense(ids, chunked=chunked)))(token_ids)


@partial(jax.jit, static_argnums=0)
def _logits(graph: Any, params: Params, token_ids: jax.Array) -> jax.Array:
    return forward(graph, params, token_ids[None])[0]


@partial(jax.jit, static_argnums=0)
def _next_logits(graph: Any, params: Params, token_ids: jax.Array, last: jax.Array) -> jax.Array:
    model = bind(graph, params)
    return model.logits(model.dense(token_ids)[last])


def dense_logits(model: LoadedModel, token_ids: list[int]) -> np.ndarray:
    """Logits at every position: float32[T, V]."""
    with jax.default_matmul_precision("highest"):
        logits = _logits(model.graph, model.params, _padded(token_ids))
    return np.asarray(logits)[: len(token_ids)]


def generate(
    model: LoadedModel, token_ids: list[int], max_tokens: int, *, stop_ids: tuple[int, ...] = ()
) -> list[int]:
    """Greedy continuation of at most `max_tokens` tokens, ending with a stop id if one comes.

    Recomputes the whole sequence for every token. Ties go to the lowest id.
    """
    ids = list(token_ids)
    with jax.default_matmul_precision("highest"):
        while len(ids) < len(token_ids) + max_tokens:
            last = jnp.int32(len(ids) - 1)
            logits = _next_logits(model.graph, model.params, _padded(ids), last)
            ids.append(int(np.argmax(np.asarray(logits))))
            if ids[-1] in stop_ids:
                break
    return ids[len(token_ids) :]


def _padded(token_ids: list[int]) -> np.ndarray:
    length = -(-max(len(token_ids), 1) // PAD_TO) * PAD_TO
    padded = np.zeros(length, np.int32)
    padded[: len(token_ids)] = token_ids
    return padded
