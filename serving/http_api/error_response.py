"""Errors in OpenAI's shape."""

from typing import Any

from starlette.responses import JSONResponse

from serving.errors import Unauthorized, client_message, error_kind


def error_body(error: BaseException, *, param: str | None = None) -> dict[str, Any]:
    """What a client is told; `param` names the field at fault."""
    kind = error_kind(error)
    message = client_message(error)
    body = {"message": message, "type": kind.openai_type, "param": param, "code": kind.code}
    return {"error": body}


def error_response(error: BaseException, *, param: str | None = None) -> JSONResponse:
    """The response to a request that ends with `error` before it has an answer."""
    kind = error_kind(error)
    headers = {} if kind.retry_after is None else {"Retry-After": str(kind.retry_after)}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error, param=param), kind.http_status, headers)
