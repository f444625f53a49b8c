"""Errors as gRPC statuses, and who may call at all."""

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from serving.errors import Unauthorized, client_message, error_kind

logger = logging.getLogger(__name__)

PUSHBACK = "grpc-retry-pushback-ms"  # how gRPC's own retry policies are told when to come again
PUBLIC = ("/grpc.health.v1.Health/",)  # answered without an API key


class Aborted(Exception):
    """The request was aborted while its client waited for it."""


@asynccontextmanager
async def reported(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Ends the call with the status of whatever is raised inside."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Aborted as error:
        await context.abort(grpc.StatusCode.ABORTED, str(error))
    except Exception as error:
        await refuse(context, error)


async def refuse(context: grpc.aio.ServicerContext, error: Exception) -> None:
    """Ends the call with the status of `error`."""
    kind = error_kind(error)
    code = grpc.StatusCode[kind.grpc_status]
    if code is grpc.StatusCode.INTERNAL:
        logger.error("a call failed", exc_info=error)
    pushback = kind.retry_after
    trailing = () if pushback is None else ((PUSHBACK, str(1000 * pushback)),)
    await context.abort(code, client_message(error), trailing)


class ApiKeys(grpc.aio.ServerInterceptor):
    """Turns away who has none of the API keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method that was called, or one that refuses."""
        metadata = dict(handler_call_details.invocation_metadata)
        scheme, _, key = str(metadata.get("authorization", "")).partition(" ")
        public = handler_call_details.method.startswith(PUBLIC)
        if public or (scheme.lower() == "bearer" and self._known(key.strip())):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_turn_away)

    def _known(self, key: str) -> bool:
        sent = key.encode()
        # Compares with every key, whatever comes out: the time says nothing.
        return sum(hmac.compare_digest(sent, known) for known in self._keys) > 0


async def _turn_away(request: Any, context: grpc.aio.ServicerContext) -> None:
    del request
    error = Unauthorized("the API key is missing or wrong; send authorization: Bearer KEY")
    await refuse(context, error)
