"""Requests that have not ended, and what their clients ask for between steps."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_jax.engine.types import MAX_UID, Request, Sequence, TokenLogprob
from hybrid_jax.engine.validation import RequestValidator
from hybrid_jax.errors import EngineDead, InvalidRequest, QueueFull
from hybrid_jax.sampling_params import SamplingParams
from hybrid_jax.structured import TokenMatcher

if TYPE_CHECKING:
    from hybrid_jax.config import EngineConfig


@dataclass(frozen=True)
class Arrival:
    """A new request."""

    sequences: list[Sequence]


@dataclass(frozen=True)
class Abort:
    """Names sequences, not an id: the id may be in use again by the time it is heard."""

    sequences: list[Sequence]


class Inbox:
    """The only part of an engine that several threads use; `lock` guards all of it.

    `items` has what was asked for and not taken yet, `requests` the sequences of every request that
    has not ended; `dead` says why nothing is accepted any more.
    """

    def __init__(self, validator: RequestValidator, config: "EngineConfig") -> None:
        self.lock = threading.RLock()
        self.requests: dict[str, list[Sequence]] = {}
        self.dead: EngineDead | None = None
        self._validator = validator
        self._config = config
        self.items: deque[Arrival | Abort] = deque()
        self._num_arrivals = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that arrived and were not taken yet."""
        return sum(len(i.sequences) for i in list(self.items) if isinstance(i, Arrival))

    def add(self, request: Request, *, num_queued: int) -> None:
        """See `Engine.add_request`; `num_queued` sequences wait elsewhere."""
        max_tokens = self._validator.check(request)
        with self.lock:
            if self.dead is not None:
                raise self.dead
            if request.request_id in self.requests:
                raise InvalidRequest(
                    f"request id {request.request_id!r} is in use; choose another or wait"
                )
            waiting, limit = self.num_waiting + num_queued, self._config.max_queue
            if limit and waiting >= limit:
                raise QueueFull(f"{waiting} sequences wait and max_queue is {limit}; retry later")
            sequences = _make_sequences(
                request,
                max_tokens=max_tokens,
                first_arrival=self._num_arrivals + 1,
                engine_seed=self._config.seed,
                make_matcher=self._validator.matcher,
            )
            self._num_arrivals += len(sequences)
            self.requests[request.request_id] = sequences
            self.items.append(Arrival(sequences))

    def abort(self, request_id: str) -> bool:
        """Asks for the end of a request; False if it is unknown or ended."""
        with self.lock:
            sequences = self.requests.get(request_id)
            if sequences is None:
                return False
            self.items.append(Abort(sequences))
            return True

    def close(self, reason: EngineDead) -> None:
        """Aborts everything and accepts nothing any more. Idempotent."""
        with self.lock:
            self.dead = self.dead or reason
            self.items.extend(Abort(sequences) for sequences in self.requests.values())

    def take(self) -> Iterator[Arrival | Abort]:
        """What was asked for, in order."""
        while self.items:
            yield self.items.popleft()

    def ended(self, request_id: str) -> None:
        """Hears that a request has had its final event."""
        with self.lock:
            del self.requests[request_id]


def _make_sequences(
    request: Request,
    *,
    max_tokens: int,
    first_arrival: int,
    engine_seed: int,
    make_matcher: Callable[[SamplingParams], TokenMatcher | None],
) -> list[Sequence]:
    """One waiting sequence per completion, with consecutive seeds."""
    seed = _seed(request.params, engine_seed, first_arrival)
    # One list for all completions; the first token has nothing before it that predicts it.
    asks = request.params.prompt_logprobs is not None
    prompt_logprobs: list[TokenLogprob | None] | None = [None] if asks else None
    return [
        Sequence(
            request=request,
            index=index,
            arrival=first_arrival + index,
            uid=(first_arrival + index - 1) % MAX_UID + 1,
            seed=(seed + index) % 2**32,
            max_tokens=max_tokens,
            token_ids=list(request.prompt_token_ids),
            matcher=make_matcher(request.params),
            prompt_logprobs=prompt_logprobs,
        )
        for index in range(request.params.num_sequences)
    ]


def _seed(params: SamplingParams, engine_seed: int, arrival: int) -> int:
    """The request's own seed, or one that is spread by the engine's seed and the arrival."""
    if params.seed is not None:
        return int(params.seed)
    mixed = (engine_seed * 0x9E3779B97F4A7C15 + arrival * 0xBF58476D1CE4E5B9) % 2**64
    return (mixed ^ (mixed >> 29)) * 0x94D049BB133111EB % 2**64 >> 32
