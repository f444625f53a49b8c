"""What every front needs to know about the server it belongs to."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time

from hybrid_jax import SamplingParams
from hybrid_jax.engine.types import Request
from hybrid_jax.errors import InvalidRequest
from serving.async_engine import AsyncEngine
from serving.config import ServerConfig
from serving.errors import NotFound
from serving.metrics import Metrics
from serving.watchdog import Watchdog


@dataclass(frozen=True)
class ServerContext:
    """The parts of one server."""

    engine: AsyncEngine
    config: ServerConfig
    watchdog: Watchdog
    metrics: Metrics
    model_name: str
    started: int = field(default_factory=lambda: int(time()))  # Unix time

    def check_model(self, name: str | None) -> None:
        """Raises NotFound unless `name` is the model served here; None means that one."""
        if name is not None and name != self.model_name:
            raise NotFound(f"there is no model {ascii(name)}; this server has {self.model_name!r}")

    def check_params(self, params: SamplingParams) -> None:
        """Raises InvalidRequest if the server's limits forbid what the engine would allow."""
        if params.num_sequences > (most := self.config.max_n):
            name = "best_of" if params.ranked else "n"
            raise InvalidRequest(
                f"{name} is {params.num_sequences} but max_n is {most}; ask for fewer"
            )
        if len(params.stop) > self.config.max_stop:
            raise InvalidRequest(
                f"stop has {len(params.stop)} strings but max_stop is {self.config.max_stop}; "
                "send fewer"
            )

    def check_length(self, prompt_tokens: int, max_tokens: int | None) -> None:
        """Raises InvalidRequest if a client asks for more tokens than fit after its prompt.

        So do OpenAI and vLLM. The library itself takes as many as fit, and so does the server when
        the client has not said how many it wants (None).
        """
        limit = self.engine.config.max_model_len
        room = limit - prompt_tokens
        if max_tokens is not None and max_tokens > room > 0:
            raise InvalidRequest(
                f"{prompt_tokens} prompt tokens and max_tokens {max_tokens} are more than "
                f"max_model_len {limit}; ask for at most {room}, or leave max_tokens out"
            )

    def healthy(self) -> bool:
        """Whether requests should be sent here."""
        return self.watchdog.problem() is None and self.engine.accepting

    async def requests(
        self,
        completion_id: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        max_tokens: int | None,
    ) -> list[Request]:
        """One engine request per prompt. Raises InvalidRequest.

        `max_tokens` is what the client said, None if nothing.
        """
        self.check_params(params)
        for ids in prompts:
            self.check_length(len(ids), max_tokens)
        requests = [
            Request(f"{completion_id}-{i}", tuple(ids), params) for i, ids in enumerate(prompts)
        ]
        if params.structured is not None:
            await self.engine.check(requests[0])
        return requests


def new_id(prefix: str) -> str:
    """A name for a completion that nothing else has."""
    return f"{prefix}-{uuid.uuid4().hex}"
