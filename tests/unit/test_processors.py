"""A logits processor that cannot work is refused by name when the engine is made."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import EngineConfig
from hybrid_jax.runtime.processors import check_processors
from hybrid_jax.runtime.sampling import LogitsContext
from tests.helpers.fake_runner import toy_model_config

VOCAB = 97
CONFIG = EngineConfig(max_num_seqs=3, max_model_len=32).resolve(toy_model_config(VOCAB))


def ban_last_token(logits: jax.Array, context: LogitsContext) -> jax.Array:
    last = jnp.take_along_axis(context.history, context.seq_lens[:, None] - 1, axis=1)
    return logits.at[jnp.arange(logits.shape[0])[:, None], last].set(-jnp.inf)


def untraceable(logits: jax.Array, context: LogitsContext) -> jax.Array:
    return jnp.asarray(np.asarray(logits))


def raises(logits: jax.Array, context: LogitsContext) -> jax.Array:
    raise RuntimeError("two\nlines")


BAD: dict[str, tuple[Any, str]] = {
    "number": (5, "map names to functions, got 'number': 5"),
    "untraceable": (untraceable, "'untraceable' cannot be traced .*make it a pure JAX function"),
    "raises": (raises, "cannot be traced .RuntimeError: two lines."),
    "one argument": (lambda logits: logits, "'one argument' cannot be traced"),
    "branches": (lambda logits, _: logits if logits[0, 0] > 0 else -logits, "cannot be traced"),
    "shape": (lambda logits, _: logits[:, :5], r"maps float32\[1, 97\] to .*5.*same shape"),
    "rows": (lambda logits, _: logits[:1], r"maps float32\[3, 97\] to"),
    "dtype": (lambda logits, _: logits.astype(jnp.bfloat16), "to .*bfloat16.*; return float32"),
    "nothing": (lambda logits, _: None, "to None; return float32"),
    "pair": (lambda logits, _: (logits, logits), "return float32 logits"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_processor_is_named(name: str) -> None:
    processor, words = BAD[name]
    with pytest.raises(ValueError, match=words) as caught:
        check_processors({"good": ban_last_token, name: processor}, CONFIG, VOCAB)
    assert "\n" not in str(caught.value)


def test_good_ones_pass_and_names_are_strings() -> None:
    scale: Callable[..., jax.Array] = jax.jit(lambda logits, _: logits * 2)
    check_processors({"ban": ban_last_token, "jitted": scale}, CONFIG, VOCAB)
    for given in ([ban_last_token], {1: ban_last_token}, ban_last_token):
        with pytest.raises(ValueError, match="must map names to functions"):
            check_processors(given, CONFIG, VOCAB)  # type: ignore[arg-type]
