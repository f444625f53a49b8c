"""The FastAPI application: routes, what surrounds them, and errors in OpenAI's shape."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

import hybrid_jax
from hybrid_jax.errors import HybridJaxError, InvalidRequest
from serving.context import ServerContext
from serving.errors import NotFound
from serving.http_api.error_response import error_response
from serving.http_api.generation import CLIENT_CLOSED_REQUEST, ClientGone
from serving.http_api.middleware import ApiKeys, BodyLimit, RequestIds
from serving.http_api.routes import (
    chat,
    completions,
    health,
    metrics,
    models,
    page,
    server_info,
    tokens,
)
from serving.http_api.schemas import ErrorResponse
from serving.tracing import CallerTrace

ROUTERS = (
    completions.router,
    chat.router,
    models.router,
    tokens.router,
    health.router,
    metrics.router,
    server_info.router,
    page.router,
)
_WANTED = "send a JSON object with Content-Type: application/json"
ERRORS = (400, 401, 404, 413, 429, 500, 503)


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Without FastAPI's own kind of error, which is never sent."""
        document = super().openapi()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return document


def create_app(context: ServerContext) -> FastAPI:
    """An application that serves what `context` says."""
    app = _App(
        title="hybrid-jax",
        version=hybrid_jax.__version__,
        description="OpenAI-compatible inference for hybrid-attention language models.",
        responses={status: {"model": ErrorResponse} for status in ERRORS},
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.context = context
    for router in ROUTERS:
        app.include_router(router)
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    # The one added last sees a request first.
    app.add_middleware(BodyLimit, max_bytes=context.config.max_body_bytes)
    app.add_middleware(ApiKeys, keys=context.config.api_keys())
    if context.config.otlp_endpoint:
        app.add_middleware(CallerTrace)
    app.add_middleware(RequestIds, on_answer=context.metrics.answered)
    return app


async def _known(request: Request, error: Any) -> Response:
    del request
    return error_response(error)


async def _invalid_body(request: Request, error: Any) -> Response:
    """FastAPI's list of faults, of which the client is told the first one."""
    del request
    first = error.errors()[0]
    place = ".".join(ascii(part).strip("'") for part in first["loc"][1:])
    if first["type"] == "json_invalid":  # its place is that of a character
        fault = f"the body is no JSON ({first['ctx']['error']} at character {place})"
        return error_response(InvalidRequest(f"{fault}; {_WANTED}"))
    message = f"{place}: {first['msg']}" if place else f"{first['msg']}; {_WANTED}"
    reason = InvalidRequest(message)
    return error_response(reason, param=place or None)


async def _http_error(request: Request, error: Any) -> Response:
    """What Starlette raises itself: no such route, wrong method, unreadable body."""
    if error.status_code == 404:
        return error_response(NotFound(f"there is no {ascii(request.url.path)} here"))
    response = error_response(InvalidRequest(str(error.detail)))
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


async def _gone(request: Request, error: Any) -> Response:
    del request, error
    return Response(status_code=CLIENT_CLOSED_REQUEST)


HANDLERS = {
    HybridJaxError: _known,
    RequestValidationError: _invalid_body,
    HTTPException: _http_error,
    ClientGone: _gone,
}
