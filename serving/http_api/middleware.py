"""What happens to every request before a route sees it: id, size, API key, and a line in the log.

Plain ASGI: a wrapper that reads the response would hide from the routes that a client has gone.
"""

import hmac
import logging
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import RequestTooLarge, Unauthorized
from serving.http_api.error_response import error_response
from serving.logs import request_id

logger = logging.getLogger("serving.access")

PUBLIC = frozenset({"/", "/health", "/ready"})  # answered without an API key
READ_ANYWAY = 16  # times the limit: a body that long is read to its end, so that the client listens
MAX_ID = 128  # characters of an X-Request-Id


class RequestIds:
    """Gives every request an id, the client's own if it sent one, and logs how it was answered."""

    def __init__(self, app: ASGIApp, on_answer: Callable[[str, str, int], None]) -> None:
        """`on_answer` hears of every answer: method, route and status."""
        self._app = app
        self._on_answer = on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection as ASGI says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        name = sent if 0 < len(sent) <= MAX_ID and sent.isprintable() else uuid.uuid4().hex
        token, began, status = request_id.set(name), time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # our bug, or a checkpoint's: the server goes on
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                await error_response(error)(scope, receive, send_with_id)
        finally:
            quiet = scope["path"] in PUBLIC or scope["path"] == "/metrics"
            logger.log(
                logging.DEBUG if quiet else logging.INFO,
                "%s %s",
                scope["method"],
                scope["path"],
                extra={"status": status, "seconds": round(time.monotonic() - began, 6)},
            )
            route = getattr(scope.get("route"), "path", "none")  # of few values, unlike the path
            self._on_answer(scope["method"], route, status)
            request_id.reset(token)


class BodyLimit:
    """Reads the body, at most so many bytes of it, before anything else is done."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection as ASGI says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, size, more = bytearray(), 0, True
        while more and size <= READ_ANYWAY * self._max_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            chunk, more = message.get("body", b""), message.get("more_body", False)
            size += len(chunk)
            if size <= self._max_bytes:
                body += chunk
        if size > self._max_bytes:
            error = RequestTooLarge(
                f"the request has more than max_body_bytes ({self._max_bytes}); shorten the prompt"
            )
            await error_response(error)(scope, receive, send)
            return
        whole: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

        async def replay() -> Message:
            nonlocal whole
            message, whole = whole, None
            return message if message is not None else await receive()

        await self._app(scope, replay, send)


class ApiKeys:
    """Turns away who has none of the API keys. No keys: everybody may come in."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection as ASGI says."""
        if scope["type"] == "http" and self._keys and scope["path"] not in PUBLIC:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not self._known(key.strip()):
                error = Unauthorized("the API key is missing or wrong; send Authorization: Bearer")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _known(self, key: str) -> bool:
        sent = key.encode()
        # Compares with every key, whatever comes out: the time says nothing.
        return sum(hmac.compare_digest(sent, known) for known in self._keys) > 0
