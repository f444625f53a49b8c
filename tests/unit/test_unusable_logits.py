"""Rows whose logits leave nothing to choose are marked, and their mates are not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.runtime.sampling import LogitsContext, SamplingRows, sample
from hybrid_jax.sampling_params import SamplingParams


def spoil(logits: jax.Array, context: LogitsContext) -> jax.Array:
    return logits * jnp.nan


def ban_all(logits: jax.Array, context: LogitsContext) -> jax.Array:
    return jnp.full_like(logits, -jnp.inf)


@pytest.mark.parametrize("processor", [spoil, ban_all])
def test_rows_without_a_usable_token_are_marked(processor: Any) -> None:
    rows = SamplingRows(4, processors=("bad",))
    rows.set_row(2, SamplingParams(temperature=1.0, logits_processors=("bad",)), 0, 1)
    logits = (
        jnp.asarray(np.random.default_rng(0).normal(0, 2, (4, 700)), jnp.float32)
        .at[3, 650]
        .set(jnp.nan)
    )
    lens, history = jnp.ones(4, jnp.int32), jnp.zeros((5, 8), jnp.int32)

    def judged(row_ids: list[int]) -> tuple[list[bool], list[bool]]:
        ids = jnp.array(row_ids, jnp.int32)
        sampled = sample(
            logits, rows.device(), ids, lens, history, max_logprobs=2, processors=(processor,)
        )
        return sampled.finite.tolist(), sampled.usable.tolist()

    assert judged([1, 3, 3, 4])[0] == [True, True, True, False]
    finite, usable = judged([1, 2, 3, 4])
    assert finite == [True, True, True, False]
    assert usable[:3] == [True, False, True]
