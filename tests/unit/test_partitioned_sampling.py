"""Sampling over logits that several devices hold compiles, and chooses the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hybrid_jax.runtime.sampling import SamplingRows, sample
from hybrid_jax.sampling_params import SamplingParams

ROWS = 3


# Log probabilities alone, and top-k with top-p, look at candidate blocks from these sizes on.
@pytest.mark.parametrize("size", [4096, 65_536])
def test_a_vocabulary_cut_over_two_devices(size: int) -> None:
    rows = SamplingRows(ROWS)
    rows.set_row(1, SamplingParams(temperature=0.0, logprobs=5), 0, 1)
    rows.set_row(2, SamplingParams(temperature=0.7, top_k=20, top_p=0.9, logprobs=2), 1, 1)
    rows.set_row(3, SamplingParams(temperature=1.0, top_p=0.5, min_p=0.01), 2, 1)
    logits = np.random.default_rng(size).normal(0, 2, (ROWS, size)).astype(np.float32)
    ids, lens = jnp.arange(1, ROWS + 1, dtype=jnp.int32), jnp.ones(ROWS, jnp.int32)
    history = jnp.zeros((ROWS + 1, 8), jnp.int32)
    table = rows.device()
    run = jax.jit(lambda x: sample(x, table, ids, lens, history, max_logprobs=20))
    alone = run(jnp.asarray(logits))
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    cut = run(jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "model"))))
    for one, two in zip(jax.tree.leaves(alone), jax.tree.leaves(cut), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(two), rtol=1e-5, atol=1e-5)
