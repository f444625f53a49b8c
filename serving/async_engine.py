"""The engine in a thread of its own, for asyncio: the one way in of all fronts.

Any number of event loops may use one `AsyncEngine`. After each step, every loop that has readers
is woken once, however many tokens there are.
"""

import asyncio
import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import EngineStats, Request, TokenEvent
from hybrid_jax.errors import EngineDead, InvalidRequest
from hybrid_jax.llm import RequestOutput
from hybrid_jax.tokenizer import HFTokenizer
from serving.errors import ShuttingDown

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_FAILURES = 3  # steps in a row that raise instead of ending requests; then the engine is dead
LONG_TEXT = 4096  # characters; longer texts are encoded in a thread, the loop must not wait


class TokenStream(AsyncIterator[TokenEvent]):
    """The events of one request; ends after its final event.

    Leaving its `with` block, or `close`, aborts the request if it has not ended. Iterate it in the
    loop that it was made in.
    """

    def __init__(
        self,
        request: Request,
        leave: "Callable[[TokenStream], object]",
        *,
        whole: bool,
        on_event: "Listener | None",
    ) -> None:
        self.request = request
        self.on_event = on_event
        self.arrived = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at: dict[int, float] = {}  # by completion
        self.loop = asyncio.get_running_loop()
        self.context = contextvars.copy_context()  # of the task that asked
        self.closed = False  # nobody reads any more
        self._leave = leave
        self._whole = whole
        self._held: list[TokenEvent] = []
        self._queue: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()
        self._ended = False

    async def __anext__(self) -> TokenEvent:
        if self._ended:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Exception):
            self._ended = True
            raise item
        self._ended = item.final
        return item

    async def collect(self) -> RequestOutput:
        """All completions, once they have ended."""
        output = RequestOutput.empty(self.request)
        async for event in self:
            output.add(event)
        return output

    def close(self) -> None:
        """Aborts the request unless it has ended. Idempotent."""
        if not self.closed and not self._ended:
            self._leave(self)
        self.closed = True

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self, event: TokenEvent, now: float) -> list[TokenEvent]:
        """Notes an event's time; returns what the reader can have now. Engine thread only."""
        if event.new_token_ids:
            self.first_token_at = self.first_token_at or now
            self.last_token_at[event.index] = now
        if self.closed:
            return []
        self._held.append(event)
        if self._whole and not event.final:
            return []
        events, self._held = self._held, []
        return events

    def put(self, items: Iterable[TokenEvent | Exception]) -> None:
        """Gives items to the reader. In the stream's loop only."""
        for item in items:
            self._queue.put_nowait(item)


Listener = Callable[[Engine, TokenEvent], None]
"""Hears of every event of one request in the engine thread, whether anybody reads it or not."""

Observer = Callable[[TokenStream, TokenEvent, float], None]
"""Hears of every event in the engine thread, with the time; the stream's times are older."""


class AsyncEngine:
    """Owns an engine and the thread that steps it. Its methods may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: HFTokenizer | None,
        *,
        observers: Sequence[Observer] = (),
        on_death: Callable[[], object] = lambda: None,
    ) -> None:
        """Args:
        engine: belongs to the engine thread from `start` on.
        tokenizer: None: prompts are token ids, and there is no text.
        observers: hear of every event.
        on_death: called in the engine thread, once, when `death` is set.
        """
        self.tokenizer = tokenizer
        self.death: Exception | None = None  # why the engine thread gave up
        self.live_bytes = engine.memory().live  # by class; the arrays' sizes never change
        self._engine = engine
        self._observers = tuple(observers)
        self._on_death = on_death
        self._changed = threading.Condition()  # guards what follows; notified of every change
        self._streams: dict[str, TokenStream] = {}  # until their final event
        self._calls: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._draining = False
        self._closing = False
        self._step_began: float | None = None  # None: nothing to do
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the engine thread."""
        self._thread.start()

    def generate(
        self, request: Request, *, whole: bool = False, on_event: Listener | None = None
    ) -> TokenStream:
        """Accepts a request; its stream has exactly one final event, or raises `EngineDead`.

        Args:
            request: ids must differ among requests that have not ended.
            whole: hand the events over all at once when the request has ended, which is cheaper.
            on_event: hears of its events in the engine thread.

        Raises:
            InvalidRequest: it can never be served. QueueFull: retry later.
            ShuttingDown: no request is accepted any more. EngineDead: nor will it ever be.
        """
        if not whole:
            request.params.check_streamable()
        stream = TokenStream(request, self._leave, whole=whole, on_event=on_event)
        with self._changed:
            if self.death is not None:
                raise self.death
            if self._draining:
                raise ShuttingDown("the server is shutting down; send the request to another one")
            if request.request_id in self._streams:
                raise InvalidRequest(
                    f"request id {request.request_id!r} is in use; choose another or wait"
                )
            self._engine.add_request(request)  # the engine thread delivers under this lock
            self._streams[request.request_id] = stream
            self._changed.notify_all()
        return stream

    def abort(self, request_id: str) -> bool:
        """Ends a request at the next step; False if it is unknown or has ended."""
        with self._changed:
            known = self._engine.abort(request_id)
            self._changed.notify_all()
        return known

    def _leave(self, stream: TokenStream) -> None:
        """Aborts a request whose stream nobody reads, but not a later one with the same id."""
        with self._changed:
            if self._streams.get(stream.request.request_id) is stream:
                self.abort(stream.request.request_id)

    def submit(self, work: Callable[[Engine], T]) -> Future[T]:
        """Has the engine thread run `work` between two steps, in the order of submission.

        The future fails with what `work` raises, or with EngineDead or ShuttingDown.
        """
        future: Future[T] = Future()
        with self._changed:
            if self.death is not None:
                future.set_exception(self.death)
            elif self._closing:
                future.set_exception(ShuttingDown("the server is shutting down"))
            else:
                self._calls.append((work, future))
                self._changed.notify_all()
        return future

    async def between_steps(self, work: Callable[[Engine], T]) -> T:
        """What `work` returns; see `submit`."""
        return await asyncio.wrap_future(self.submit(work))

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises InvalidRequest if there are none, or no tokenizer."""
        if not text:
            raise InvalidRequest("the prompt is empty; give at least one character")
        encode, options = (
            self.require_tokenizer().encode,
            {"add_special_tokens": add_special_tokens},
        )
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(encode, text, **options)
        return encode(text, **options)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_args: Any
    ) -> tuple[str, list[int]]:
        """Prompt text and token ids of a conversation. Raises InvalidRequest."""
        text = self.require_tokenizer().render_chat(messages, **template_args)
        return text, await self.encode(text, add_special_tokens=False)

    def require_tokenizer(self) -> HFTokenizer:
        """The tokenizer. Raises InvalidRequest if there is none."""
        if self.tokenizer is None:
            raise InvalidRequest("this model has no tokenizer; send token ids instead of text")
        return self.tokenizer

    async def check(self, request: Request) -> None:
        """Raises InvalidRequest if `generate` would find fault with the request.

        To be awaited before `generate` when the request has structured output: preparing a grammar
        takes up to seconds, which are spent in a thread here and in the caller's loop there.
        """
        await asyncio.to_thread(self._engine.validate, request)

    @property
    def config(self) -> EngineConfig:
        """The engine's resolved configuration."""
        return self._engine.config

    @property
    def model_config(self) -> ModelConfig:
        """The model that runs."""
        return self._engine.model_config

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        return self._engine.stats()

    def stalled_seconds(self) -> float:
        """How long the current step has been running; 0 when there is nothing to do."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def accepting(self) -> bool:
        """Whether a valid request would be accepted, if the queue has room."""
        return not self._draining and self.death is None and self._thread.is_alive()

    async def drain(self, deadline_s: float) -> None:
        """Accepts nothing more and waits until all requests have ended; aborts them at last."""
        with self._changed:
            self._draining = True
        if not await asyncio.to_thread(self._wait_until_idle, deadline_s):
            with self._changed:
                unfinished = list(self._streams)
            logger.warning("aborting %d requests that did not end in time", len(unfinished))
            for request_id in unfinished:
                self.abort(request_id)
            await asyncio.to_thread(self._wait_until_idle, deadline_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Ends everything and the thread; every open stream has its final event. Idempotent."""
        with self._changed:
            self._draining = self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _wait_until_idle(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._streams, timeout_s)

    def _run(self) -> None:
        failures = 0
        try:
            while self._wait_for_work():
                self._answer_calls()
                try:
                    events = self._engine.step()
                    failures = 0
                except Exception:
                    logger.exception("a step raised; all running requests are computed again")
                    failures += 1
                    if failures == MAX_FAILURES:
                        raise
                    continue
                self._deliver(events)
                if self._engine.dead is not None and not self._engine.has_work():
                    raise self._engine.dead
            self._answer_calls()
            self._engine.close()
            self._deliver(self._engine.step())
        except Exception as error:
            logger.critical("the engine thread ends", exc_info=error)
            self._die(error)

    def _wait_for_work(self) -> bool:
        """Sleeps while there is nothing to do; False when the thread is to end."""
        with self._changed:
            if not self._engine.has_work():
                self._step_began = None
                self._changed.wait_for(
                    lambda: self._closing or self._calls or self._engine.has_work()
                )
            self._step_began = time.monotonic()
            return not self._closing

    def _answer_calls(self) -> None:
        while self._calls:
            work, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work(self._engine))
            except Exception as error:
                future.set_exception(error)

    def _deliver(self, events: list[TokenEvent]) -> None:
        now = time.monotonic()
        letters: dict[asyncio.AbstractEventLoop, list[tuple[TokenStream, list[TokenEvent]]]] = {}
        with self._changed:
            for event in events:
                stream = self._streams[event.request_id]
                if stream.on_event is not None:
                    stream.on_event(self._engine, event)
                for observe in self._observers:
                    observe(stream, event, now)
                if ready := stream.take(event, now):
                    letters.setdefault(stream.loop, []).append((stream, ready))
                if event.final:
                    del self._streams[event.request_id]
            if not self._streams:
                self._changed.notify_all()
        for loop, mail in letters.items():
            with suppress(RuntimeError):  # the loop is closed, and so are its readers
                loop.call_soon_threadsafe(_hand_out, mail)

    def _die(self, cause: Exception) -> None:
        """Ends all streams with an error; nothing is accepted any more."""
        dead = cause
        if not isinstance(cause, EngineDead):
            dead = EngineDead(f"the engine died of {type(cause).__name__}; restart the server")
            dead.__cause__ = cause
        with self._changed:
            self.death = dead
            streams = list(self._streams.values())
            self._streams.clear()
            calls, self._calls = self._calls, deque()
            self._step_began = None
            self._changed.notify_all()
        for stream in streams:
            with suppress(RuntimeError):
                stream.loop.call_soon_threadsafe(stream.put, [dead])
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(dead)
        self._on_death()


def _hand_out(mail: list[tuple[TokenStream, list[TokenEvent]]]) -> None:
    for stream, events in mail:
        stream.put(events)
