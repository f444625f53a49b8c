"""Log probabilities of texts against the oracle's logits."""

import math
import os
from collections.abc import Callable

import numpy as np
import pytest

from hybrid_jax.decoding import loglikelihood, perplexity, prompt_logprobs
from hybrid_jax.errors import InvalidRequest
from hybrid_jax.generate import dense_logits
from hybrid_jax.loading import LoadedModel
from tests.decoding.conftest import GetWorkspace
from tests.helpers.real_engine import random_prompt

SEED = int(os.environ.get("HYBRID_JAX_TEST_SEED") or int.from_bytes(os.urandom(3)))
TOLERANCE = 1e-3  # float32 logits of order ten, summed in another order


Text = tuple[list[int], np.ndarray, list[int]]


@pytest.fixture
def text(models: Callable[[str], LoadedModel]) -> Text:
    """Tokens, the log probability of each but the first, and the likeliest token at each place."""
    ids = list(random_prompt(50, SEED))
    logits = np.asarray(dense_logits(models("lara_mini"), ids)).astype(np.float64)[:-1]
    every = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return ids, every[np.arange(49), ids[1:]], logits.argmax(axis=-1).tolist()


def test_every_token(workspace: GetWorkspace, text: Text) -> None:
    """In one call or in pieces, over several steps."""
    ids, wanted, _ = text
    for cuts in ([0, 50], [0, 1, 2, 37, 50]):
        with workspace("lara_mini").session() as session:
            parts = [prompt_logprobs(session, ids[a:b]) for a, b in zip(cuts, cuts[1:])]  # noqa: B905
        found = np.concatenate(parts)
        assert math.isnan(found[0])
        assert np.abs(found[1:] - wanted).max() < TOLERANCE
    with workspace("lara_mini").session() as session:
        assert abs(math.log(perplexity(session, ids)) + wanted.mean()) < TOLERANCE
    with (
        workspace("lara_mini").session() as session,
        pytest.raises(InvalidRequest, match="give at least two"),
    ):
        perplexity(session, ids[:1])


def test_continuations(workspace: GetWorkspace, text: Text) -> None:
    ids, wanted, likeliest = text
    space = workspace("lara_mini")
    for cut in (1, 20, 49):
        with space.session() as session:
            score = loglikelihood(session, ids[:cut], ids[cut:])
        assert abs(score.logprob - wanted[cut - 1 :].sum()) < TOLERANCE * (50 - cut)
        assert not score.is_greedy
    trunk = space.session()
    trunk.prefill(ids[:20])
    (fork,) = trunk.fork(1)
    score = loglikelihood(fork, [], [likeliest[19]])
    assert score.is_greedy
    assert score.logprob >= loglikelihood(trunk, [], ids[20:21]).logprob
    with pytest.raises(InvalidRequest, match="needs something before it"):
        loglikelihood(space.session(), [], ids)
