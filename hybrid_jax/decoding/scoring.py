"""How likely a text is: log probabilities of tokens, of a continuation, and perplexity."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hybrid_jax.decoding.sampling import log_softmax
from hybrid_jax.decoding.session import Session
from hybrid_jax.errors import InvalidRequest


class Score(NamedTuple):
    """Of a continuation."""

    logprob: float  # sum over its tokens
    is_greedy: bool  # every token is the most likely one where it stands


def prompt_logprobs(session: Session, token_ids: Sequence[int]) -> np.ndarray:
    """Feeds tokens. Returns f32[tokens]: each one's log probability after all that came before.

    The first token of an empty session comes after nothing: NaN.
    """
    return _score(session, token_ids)[0]


def loglikelihood(session: Session, prompt: Sequence[int], continuation: Sequence[int]) -> Score:
    """Feeds a prompt, which may be empty unless the session is, and scores what follows it.

    The session has been fed both afterwards; a fork keeps the prompt for other continuations.

    Raises:
        InvalidRequest: there is nothing before the continuation, or no continuation.
    """
    if not len(prompt) and not session.token_ids:
        raise InvalidRequest(
            "a continuation needs something before it; begin with the model's first token"
        )
    if len(prompt):
        session.prefill(prompt)
    logprobs, likeliest = _score(session, continuation)
    return Score(float(logprobs.sum()), likeliest)


def perplexity(session: Session, token_ids: Sequence[int]) -> float:
    """Feeds tokens. Returns exp of the mean negative log probability; NaN does not count.

    Raises:
        InvalidRequest: no token has a log probability: one token in an empty session.
    """
    logprobs = prompt_logprobs(session, token_ids)
    known = logprobs[~np.isnan(logprobs)]
    if not len(known):
        raise InvalidRequest("one token after nothing has no perplexity; give at least two")
    return math.exp(-known.mean())


def _score(session: Session, token_ids: Sequence[int]) -> tuple[np.ndarray, bool]:
    """Log probability of each token, and whether all are the most likely ones."""
    tokens = np.asarray(token_ids, np.int64)
    before = session.next_logits[None] if session.token_ids else None
    logits = session.logits(token_ids)[:-1]
    if before is not None:
        logits = np.concatenate([before, logits])
    missing = len(tokens) - len(logits)
    scored = tokens[missing:]
    logprobs = np.take_along_axis(log_softmax(logits), scored[:, None], axis=-1)[:, 0]
    return np.pad(logprobs, (missing, 0), constant_values=np.nan), bool(
        (logits.argmax(axis=-1) == scored).all()
    )
