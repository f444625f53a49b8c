"""Greedy decoding and sampling: the loop, and the sampler that serving uses.

Min-p, top-k, top-p, penalties and biases are fields of `SamplingParams`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import jax
import numpy as np

from hybrid_jax.decoding.session import Session
from hybrid_jax.errors import InvalidRequest, NonFiniteLogits, NothingToSample
from hybrid_jax.fields import shown
from hybrid_jax.runtime.sampling import LogitsProcessor, SamplingRows, sample
from hybrid_jax.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NOTHING = -1  # stands for a token where nothing is left to sample


class Decodable(Protocol):
    """What a loop that chooses tokens needs: a `Session`, or logits made of several sessions."""

    token_ids: list[int]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        ...

    @property
    def next_logits(self) -> np.ndarray:
        """f32[V]: logits of the next token."""
        ...

    def decode(self, token_id: int) -> np.ndarray:
        """Feeds one token. Returns `next_logits`."""
        ...


class Sampler:
    """Draws tokens as serving does: the same function of logits, parameters, seed and position."""

    def __init__(
        self,
        params: SamplingParams = GREEDY,
        *,
        prompt_len: int = 0,
        stop_ids: Sequence[int] = (),
        processors: Mapping[str, LogitsProcessor] | None = None,
    ) -> None:
        """Uploads the parameters.

        Args:
            params: `seed` None means 0. What is about text or about several completions is refused.
            prompt_len: tokens that penalties count as prompt, and `min_tokens` does not count.
            stop_ids: tokens that end a text, besides `params.stop_token_ids`.
            processors: the functions behind the names in `params.logits_processors`.

        Raises:
            InvalidRequest: a parameter means nothing here.
        """
        for name in ("n", "stop", "structured", "logprobs"):
            if (value := getattr(params, name)) != getattr(GREEDY, name):
                raise InvalidRequest(
                    f"{name} {shown(value)} has no meaning for a session, which knows token ids "
                    "only; leave it out or use LLM.generate"
                )
        given = dict(processors or {})
        self.stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else stop_ids)}
        rows = SamplingRows(1, processors=tuple(given))
        rows.set_row(1, params, params.seed or 0, prompt_len, stop_ids=sorted(self.stop_ids))
        self._table = rows.device()
        self._sample = partial(_sample, processors=tuple(given.values()))

    def __call__(self, logits: np.ndarray, token_ids: Sequence[int]) -> list[int]:
        """One token after each of the last N of `token_ids`.

        Args:
            logits: f32[N, V] after each of these tokens.
            token_ids: all tokens up to the last of them.

        Returns:
            Per row a token, or `NOTHING` where the parameters leave none.

        Raises:
            NonFiniteLogits: there are NaN among the logits.
        """
        if np.isnan(logits).any():
            raise NonFiniteLogits("the logits hold NaN")
        count, length = len(logits), len(token_ids)
        padded = max(64, 1 << (length - 1).bit_length())  # few shapes compile
        history = np.zeros((2, padded), np.int32)
        history[1, :length] = token_ids
        lens = np.arange(length - count + 1, length + 1, dtype=np.int32)
        sampled = self._sample(logits, self._table, np.ones(count, np.int32), lens, history)
        return np.where(sampled.usable, sampled.tokens, NOTHING).tolist()


_sample = jax.jit(partial(sample, max_logprobs=0), static_argnames="processors")


def sampler_for(
    source: Decodable,
    params: SamplingParams,
    processors: Mapping[str, LogitsProcessor] | None = None,
) -> Sampler:
    """The sampler of what follows a session's present tokens."""
    return Sampler(
        params, prompt_len=len(source.token_ids), stop_ids=source.stop_ids, processors=processors
    )


def require(token: int) -> int:
    """The token, unless it is `NOTHING`: NothingToSample then."""
    if token == NOTHING:
        raise NothingToSample("the sampling parameters exclude every token")
    return token


def generate(
    source: Decodable,
    params: SamplingParams = GREEDY,
    *,
    processors: Mapping[str, LogitsProcessor] | None = None,
) -> list[int]:
    """The next `params.max_tokens` tokens, or fewer if a stop token comes, which is then the last.

    The last token is not fed. The tokens are those of `LLM.generate` with the same parameters and
    seed.

    Raises:
        NothingToSample: the parameters exclude every token.
    """
    sampler = sampler_for(source, params, processors)
    new: list[int] = []
    logits = source.next_logits
    while True:
        (token,) = sampler(logits[None], source.token_ids)
        new.append(require(token))
        if token in sampler.stop_ids or len(new) == params.max_tokens:
            return new
        logits = source.decode(token)


@dataclass
class Completion:
    """A sampled continuation."""

    token_ids: list[int]
    logprobs: list[float]  # of each token, from the model's logits as they are


def sample_many(
    session: Session,
    count: int,
    params: SamplingParams,
    *,
    processors: Mapping[str, LogitsProcessor] | None = None,
) -> list[Completion]:
    """Independent continuations, decoded together, a token of each per step; see `generate`.

    Continuation i has the seed `params.seed + i`.
    """
    first = params.seed or 0
    samplers = [
        sampler_for(session, replace(params, seed=first + i), processors) for i in range(count)
    ]
    completions = [Completion([], []) for _ in range(count)]
    forks = session.fork(count)
    running = list(range(count))
    while running:
        for i in list(running):
            logits, done = forks[i].next_logits, completions[i]
            (token,) = samplers[i](logits[None], forks[i].token_ids)
            done.token_ids.append(require(token))
            done.logprobs.append(float(log_softmax(logits)[token]))
            if token in samplers[i].stop_ids or len(done.token_ids) == params.max_tokens:
                running.remove(i)
                forks[i].close()
        if running:
            last = [completions[i].token_ids[-1] for i in running]
            session.workspace.decode([forks[i] for i in running], last)
    return completions


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """f32[..., V] log probabilities."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
