"""Holds users' logits processors against their contract before any request meets them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hybrid_jax.config import EngineConfig
from hybrid_jax.fields import reason, shown
from hybrid_jax.runtime.sampling import LogitsContext


def check_processors(processors: Mapping[str, Any], config: EngineConfig, vocab_size: int) -> None:
    """Traces every processor for one row and for all rows. `config` is resolved.

    Raises:
        ValueError: a processor is no pure JAX function from (f32[rows, V], LogitsContext) to
            f32[rows, V]; the message names it.
    """
    if not isinstance(processors, Mapping):
        raise ValueError(
            f"logits_processors must map names to functions, got {shown(processors)}; use a dict"
        )
    for name, processor in processors.items():
        if not isinstance(name, str) or not callable(processor):
            raise ValueError(
                f"logits_processors must map names to functions, got {shown(name)}: "
                f"{shown(processor)}; correct this entry"
            )
        for rows in {1, config.row_buckets[-1] * config.tokens_per_decode}:
            _check(name, processor, rows, vocab_size, config.max_positions)


def _check(name: str, processor: Any, rows: int, vocab_size: int, length: int) -> None:
    count = jax.ShapeDtypeStruct((rows,), jnp.int32)
    history = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    logits = jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32)
    try:
        result = jax.eval_shape(processor, logits, LogitsContext(history, count, count))  # type: ignore[arg-type]
    except Exception as error:  # whatever the user's function raises
        raise ValueError(
            f"logits processor {name!r} cannot be traced ({type(error).__name__}: "
            f"{reason(error)}); make it a pure JAX function of (logits, context)"
        ) from error
    if getattr(result, "shape", None) != logits.shape or result.dtype != logits.dtype:
        raise ValueError(
            f"logits processor {name!r} maps float32{list(logits.shape)} to {shown(result)}; "
            "return float32 logits of the same shape"
        )
