"""From engine requests to responses, whole or streamed; aborts when the client has gone."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hybrid_jax.engine.types import Request as EngineRequest
from hybrid_jax.engine.types import TokenEvent, Usage
from hybrid_jax.llm import RequestOutput
from serving.async_engine import AsyncEngine, TokenStream
from serving.http_api.error_response import error_body

logger = logging.getLogger(__name__)
T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; for the log
EVENT_STREAM = "text/event-stream"
DONE = "data: [DONE]\n\n"  # ends a stream
# For the OpenAPI document: with `stream` the answer is not JSON.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {EVENT_STREAM: {}}}}


class ChunkFormat(Protocol):
    """How an endpoint writes a stream."""

    def begin(self, index: int) -> dict[str, Any] | None:
        """The chunk before the first text of choice `index`, if there is one."""
        ...

    def chunk(self, index: int, event: TokenEvent) -> dict[str, Any]:
        """The chunk for an event of choice `index`."""
        ...

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, which has no choice."""
        ...


class ClientGone(Exception):
    """Nobody waits for the response any more."""


async def collect(
    http: Request, engine: AsyncEngine, requests: Sequence[EngineRequest]
) -> list[RequestOutput]:
    """The outputs of all requests.

    Raises:
        ClientGone: the client went away; the requests were aborted.
        Exception: what `AsyncEngine.generate` raises, or the error that a completion ended with.
    """
    with ExitStack() as stack:
        streams = _accept(stack, engine, requests, whole=True)

        async def read() -> list[RequestOutput]:
            return [await stream.collect() for stream in streams]

        outputs = await _unless_gone(http, read())
    for output in outputs:
        for completion in output.outputs:
            if completion.error is not None:
                raise completion.error
    return outputs


def total_usage(usages: Iterable[Usage | None]) -> Usage:
    """The usage of several requests together."""
    known = [usage for usage in usages if usage is not None]
    return Usage(
        sum(usage.prompt_tokens for usage in known),
        sum(usage.completion_tokens for usage in known),
        sum(usage.cached_tokens for usage in known),
        sum(usage.draft_tokens for usage in known),
        sum(usage.accepted_tokens for usage in known),
    )


def usage_body(usage: Usage) -> dict[str, Any]:
    """A usage in OpenAI's shape."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.draft_tokens - usage.accepted_tokens,
        },
    }


def stream(
    engine: AsyncEngine,
    requests: Sequence[EngineRequest],
    make_format: Callable[[], ChunkFormat],
    *,
    include_usage: bool,
) -> Response:
    """A response of server-sent events. Raises what `AsyncEngine.generate` raises."""
    stack = ExitStack()
    with stack:
        streams = _accept(stack, engine, requests, whole=False)
        owned = stack.pop_all()
    return _EventResponse(owned, _chunks(streams, make_format(), include_usage))


class _EventResponse(StreamingResponse):
    """Closes the token streams however it ends, also if it never began."""

    def __init__(self, streams: ExitStack, chunks: AsyncIterator[str]) -> None:
        super().__init__(chunks, media_type=EVENT_STREAM, headers={"Cache-Control": "no-cache"})
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._streams:
            await super().__call__(scope, receive, send)


def _accept(
    stack: ExitStack, engine: AsyncEngine, requests: Sequence[EngineRequest], *, whole: bool
) -> list[TokenStream]:
    """All requests or none: a refusal ends those accepted before it."""
    return [stack.enter_context(engine.generate(r, whole=whole)) for r in requests]


async def _chunks(
    streams: Sequence[TokenStream], form: ChunkFormat, include_usage: bool
) -> AsyncIterator[str]:
    n = streams[0].request.params.n
    usages: list[Usage | None] = []
    try:
        for index in range(n * len(streams)):
            if (first := form.begin(index)) is not None:
                yield sse(first)
        async for i, event in _merged(streams):
            if event.error is not None:
                raise event.error
            if event.text or event.new_token_ids or event.finish_reason:
                yield sse(form.chunk(n * i + event.index, event))
            usages.append(event.usage)
        if include_usage:
            yield sse(form.usage(total_usage(usages)))
    except Exception as error:  # the status is sent already: the client learns of it in the stream
        logger.error("a stream ends with an error", exc_info=error)
        yield sse(error_body(error))
    yield DONE


async def _merged(streams: Sequence[TokenStream]) -> AsyncIterator[tuple[int, TokenEvent]]:
    """The events of all streams as they come, with the number of their stream."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    waiting = {asyncio.ensure_future(anext(s)): i for i, s in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i, event = waiting.pop(task), task.result()
                if not event.final:
                    waiting[asyncio.ensure_future(anext(streams[i]))] = i
                yield i, event
    finally:
        for task in waiting:
            task.cancel()


async def _unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def sse(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
