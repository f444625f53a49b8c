"""A conversation whose memory stays where it is between its turns."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hybrid_jax.cache.prefix import Prefix
from hybrid_jax.cache.snapshot import Snapshot
from hybrid_jax.engine.kept import KeptPrefixes
from hybrid_jax.errors import InvalidRequest, SnapshotError
from hybrid_jax.prompts import TokenIds
from hybrid_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hybrid_jax.llm import RequestOutput


class RunTurn(Protocol):
    """Completes known tokens and a new prompt, starting from a kept prefix of the former."""

    def __call__(
        self,
        known: TokenIds,
        prompt: str | TokenIds,
        sampling_params: SamplingParams | None,
        prefix: Prefix | None,
    ) -> "RequestOutput":
        """The output brings the prefix of the next turn."""
        ...


@dataclass(eq=False)
class Session:
    """Made by `LLM.session`. Not thread-safe.

    Its pages and slots stay on the device, pinned, until `close`: a turn computes nothing but the
    new tokens, whatever else has been running. `token_ids` are all tokens so far.
    """

    _kept: KeptPrefixes
    _run: RunTurn
    token_ids: TokenIds
    _prefix: Prefix | None = None
    _closed: bool = False

    def generate(
        self, prompt: str | TokenIds, sampling_params: SamplingParams | None = None
    ) -> "RequestOutput":
        """The next turn: appends `prompt` and its completion to the conversation.

        Raises:
            InvalidRequest: the turn can never be served, or the session is closed; the
                conversation is as before.
        """
        self._check_open()
        output = self._run(self.token_ids, prompt, sampling_params, self._prefix)
        self._prefix = output.kept
        self.token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        return output

    def fork(self) -> "Session":
        """Another session with the same past. They share memory and write to none of it.

        Raises:
            InvalidRequest: the session is closed.
        """
        self._check_open()
        prefix = None if self._prefix is None else self._kept.share(self._prefix)
        return Session(self._kept, self._run, list(self.token_ids), prefix)

    def snapshot(self) -> Snapshot:
        """Copies the session's memory to the host; `LLM.session(snapshot)` goes on from it.

        Raises:
            InvalidRequest: the session is closed.
            SnapshotError: nothing is computed yet, or the engine had to recover since.
        """
        self._check_open()
        if self._prefix is None:
            raise SnapshotError("the session has computed nothing; generate before a snapshot")
        return self._kept.snapshot(self._prefix, self.token_ids)

    def close(self) -> None:
        """Gives the memory back; the session is of no more use. Idempotent."""
        self._closed = True
        if self._prefix is not None:
            self._kept.drop(self._prefix)
            self._prefix = None

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("the session is closed; open another with LLM.session()")

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
