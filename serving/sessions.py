"""Conversations that keep their memory between calls, by id: `hybrid_jax.session` for clients.

A turn that fails, is cancelled or is aborted leaves its session as it was. All state is touched in
the engine thread only, between steps, so that nothing here needs a lock.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from hybrid_jax.cache.prefix import Prefix
from hybrid_jax.cache.snapshot import Snapshot
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request, TokenEvent
from hybrid_jax.errors import EngineDead, SnapshotError
from hybrid_jax.sampling_params import SamplingParams
from serving.async_engine import AsyncEngine, TokenStream
from serving.config import ServerConfig
from serving.errors import NotFound, SessionBusy, ShuttingDown, TooManySessions

SWEEP_SECONDS = 1.0  # between two looks at who has been idle for too long

Encode = Callable[[tuple[int, ...]], Awaitable[tuple[str | None, list[int]]]]
"""Text and token ids of a turn's prompt, given the tokens that the session knows already."""


@dataclass(frozen=True)
class SessionInfo:
    """What a client may know of a session."""

    session_id: str
    num_tokens: int
    computed_tokens: int  # whose memory is held
    busy: bool
    idle_seconds: float


@dataclass(eq=False)
class _Session:
    session_id: str
    token_ids: tuple[int, ...]
    prefix: Prefix | None  # None: nothing is computed
    used: float  # on the clock
    turn: "_Turn | None" = None  # under way


@dataclass(eq=False)
class _Turn:
    """A request of a session, from before it is made until its final event."""

    session_id: str
    request_id: str
    session: _Session | None = None  # once it has begun
    prefix: Prefix | None = None  # its own hold on the session's memory
    token_ids: tuple[int, ...] = ()  # prompt and output
    accepted: bool = False  # by the engine; until then its request id may be somebody else's


class Sessions:
    """The sessions of one server. Its public methods may be called from any event loop.

    Raises, all of them: NotFound for an unknown id, EngineDead and ShuttingDown.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._most = config.max_sessions
        self._idle_seconds = config.session_idle_seconds
        self._clock = clock
        self._sessions: dict[str, _Session] = {}

    async def open(self) -> SessionInfo:
        """A session without tokens. Raises TooManySessions."""
        return await self._engine.between_steps(lambda engine: self._add(engine, lambda: None, ()))

    async def fork(self, session_id: str) -> SessionInfo:
        """Another session with the same past, as of the last turn that ended.

        Raises TooManySessions.
        """

        def work(engine: Engine) -> SessionInfo:
            parent = self._get(session_id)
            share = lambda: parent.prefix and engine.kept.share(parent.prefix)  # noqa: E731
            return self._add(engine, share, parent.token_ids)

        return await self._engine.between_steps(work)

    async def snapshot(self, session_id: str) -> Snapshot:
        """The session's memory on the host, as of the last turn that ended.

        Raises SnapshotError: nothing is computed.
        """

        def work(engine: Engine) -> Snapshot:
            session = self._get(session_id)
            session.used = self._clock()
            if session.prefix is None:
                raise SnapshotError("the session has computed nothing; generate before a snapshot")
            return engine.kept.snapshot(session.prefix, session.token_ids)

        return await self._engine.between_steps(work)

    async def restore(self, snapshot: Snapshot) -> SessionInfo:
        """A session that goes on from a snapshot. Raises TooManySessions, SnapshotError."""
        return await self._engine.between_steps(
            lambda engine: self._add(
                engine, lambda: engine.kept.restore(snapshot), snapshot.token_ids
            )
        )

    async def close(self, session_id: str) -> None:
        """Gives a session's memory back and aborts its turn, if one is under way."""
        await self._engine.between_steps(lambda engine: self._close(engine, self._get(session_id)))

    async def infos(self) -> list[SessionInfo]:
        """All sessions, the oldest first."""
        return await self._engine.between_steps(
            lambda engine: [self._info(engine, session) for session in self._sessions.values()]
        )

    async def generate(
        self,
        session_id: str,
        encode: Encode,
        params: SamplingParams,
        request_id: str,
        *,
        whole: bool,
    ) -> TokenStream:
        """The session's next turn. Raises SessionBusy, and what `AsyncEngine.generate` raises."""
        turn = _Turn(session_id, request_id)
        try:
            known = await self._engine.between_steps(lambda engine: self._begin(engine, turn))
            text, ids = await encode(known)
            turn.token_ids = (*known, *ids)
            request = Request(
                request_id, turn.token_ids, params, text, prefix=turn.prefix, keep=True
            )
            if params.structured is not None:
                await self._engine.check(request)
            stream = self._engine.generate(request, whole=whole, on_event=partial(self._hear, turn))
            turn.accepted = True
            return stream
        except BaseException:  # a cancelled call as well
            self._engine.submit(lambda engine: self._cancel(engine, turn))  # after `_begin`
            raise

    async def close_idle(self) -> None:
        """Closes what has been idle for too long, for ever; to be run as a task."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if self._sessions:
                self._engine.submit(self._sweep)

    async def close_all(self) -> None:
        """Gives all memory back, as far as there is an engine to give it to."""

        def work(engine: Engine) -> None:
            for session in list(self._sessions.values()):
                self._close(engine, session)

        try:
            await self._engine.between_steps(work)
        except (EngineDead, ShuttingDown):
            self._sessions.clear()

    # What follows runs in the engine thread.

    def _hear(self, turn: _Turn, engine: Engine, event: TokenEvent) -> None:
        """Notes an event of a turn; the last one may bring the session's new memory."""
        turn.token_ids += event.new_token_ids
        session = turn.session
        assert session is not None
        closed = self._sessions.get(session.session_id) is not session
        if not event.final:
            if closed:  # before the engine accepted the turn
                engine.abort(turn.request_id)
            return
        session.turn, session.used = None, self._clock()
        if event.kept is None:
            return
        if closed:
            engine.kept.drop(event.kept)
            return
        if session.prefix is not None:
            engine.kept.drop(session.prefix)
        session.prefix, session.token_ids = event.kept, turn.token_ids

    def _get(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound(
                f"there is no session {ascii(session_id)}; it was closed, or idle for longer than "
                f"session_idle_seconds ({self._idle_seconds:g})"
            )
        return session

    def _add(
        self, engine: Engine, hold: Callable[[], Prefix | None], token_ids: tuple[int, ...]
    ) -> SessionInfo:
        if len(self._sessions) >= self._most:
            raise TooManySessions(
                f"{len(self._sessions)} sessions are open and max_sessions is {self._most}; close "
                "one and retry"
            )
        session = _Session(f"session-{uuid.uuid4().hex}", token_ids, hold(), self._clock())
        self._sessions[session.session_id] = session
        return self._info(engine, session)

    def _begin(self, engine: Engine, turn: _Turn) -> tuple[int, ...]:
        session = self._get(turn.session_id)
        if session.turn is not None:
            raise SessionBusy(
                f"session {session.session_id} has a turn under way "
                f"({ascii(session.turn.request_id)}); wait for its end, abort it, or fork the "
                "session"
            )
        turn.session, session.turn = session, turn
        turn.prefix = session.prefix and engine.kept.share(session.prefix)
        return session.token_ids

    def _cancel(self, engine: Engine, turn: _Turn) -> None:
        """Undoes `_begin`, if it ran, for a request that the engine has not accepted."""
        if turn.session is not None:
            turn.session.turn = None
        if turn.prefix is not None:
            engine.kept.drop(turn.prefix)

    def _close(self, engine: Engine, session: _Session) -> None:
        del self._sessions[session.session_id]
        if session.turn is not None and session.turn.accepted:
            engine.abort(session.turn.request_id)
        if session.prefix is not None:
            engine.kept.drop(session.prefix)

    def _sweep(self, engine: Engine) -> None:
        earliest = self._clock() - self._idle_seconds
        for session in list(self._sessions.values()):
            if session.turn is None and session.used < earliest:
                self._close(engine, session)

    def _info(self, engine: Engine, session: _Session) -> SessionInfo:
        prefix = session.prefix
        return SessionInfo(
            session.session_id,
            len(session.token_ids),
            prefix.length if prefix is not None and engine.kept.holds(prefix) else 0,
            session.turn is not None,
            self._clock() - session.used,
        )
