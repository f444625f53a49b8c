"""What a client is told about an error: one table for HTTP and gRPC."""

from dataclasses import dataclass

from hybrid_jax.errors import (
    CachesFull,
    EngineDead,
    GrammarError,
    HybridJaxError,
    InvalidRequest,
    NothingToSample,
    QueueFull,
    SnapshotError,
    SnapshotTooLarge,
)


class ServingError(HybridJaxError):
    """Base of the errors that only a server can have."""


class Unauthorized(ServingError):
    """The API key is missing or wrong."""


class NotFound(ServingError):
    """There is no model, request, session, snapshot or route of that name."""


class RequestTooLarge(ServingError):
    """The request has more bytes than the server reads."""


class ShuttingDown(ServingError):
    """The server ends what it has accepted and accepts nothing more."""


class TooManySessions(ServingError):
    """As many sessions are open as may be."""


class SessionBusy(ServingError):
    """The session has a turn under way."""


class NoSnapshotDirectory(ServingError):
    """The server has no place for files of snapshots."""


@dataclass(frozen=True)
class ErrorKind:
    """How one kind of error is named on the wire."""

    http_status: int
    openai_type: str
    code: str
    grpc_status: str  # a member of grpc.StatusCode
    retry_after: int | None = None  # seconds


INVALID = ErrorKind(400, "invalid_request_error", "invalid_value", "INVALID_ARGUMENT")
_PRECONDITION = ErrorKind(
    409, "invalid_request_error", "failed_precondition", "FAILED_PRECONDITION"
)
_EXHAUSTED = ErrorKind(429, "rate_limit_error", "resource_exhausted", "RESOURCE_EXHAUSTED")
INTERNAL = ErrorKind(500, "server_error", "internal_error", "INTERNAL")

# The first class that an error is an instance of decides; everything else is INTERNAL.
ERROR_KINDS: dict[type[Exception], ErrorKind] = {
    InvalidRequest: INVALID,
    NothingToSample: INVALID,  # as is a grammar that leads nowhere: seen only on the way
    GrammarError: INVALID,
    Unauthorized: ErrorKind(401, "authentication_error", "invalid_api_key", "UNAUTHENTICATED"),
    NotFound: ErrorKind(404, "invalid_request_error", "not_found", "NOT_FOUND"),
    RequestTooLarge: ErrorKind(
        413, "invalid_request_error", "request_too_large", "RESOURCE_EXHAUSTED"
    ),
    CachesFull: _EXHAUSTED,
    SnapshotTooLarge: _EXHAUSTED,
    SnapshotError: _PRECONDITION,
    SessionBusy: _PRECONDITION,
    NoSnapshotDirectory: _PRECONDITION,
    TooManySessions: _EXHAUSTED,
    QueueFull: ErrorKind(429, "rate_limit_error", "queue_full", "RESOURCE_EXHAUSTED", 1),
    ShuttingDown: ErrorKind(503, "server_error", "shutting_down", "UNAVAILABLE", 5),
    EngineDead: ErrorKind(503, "server_error", "engine_dead", "UNAVAILABLE", 30),
}


def error_kind(error: BaseException) -> ErrorKind:
    """The row of `ERROR_KINDS` that `error` belongs to."""
    for cls, kind in ERROR_KINDS.items():
        if isinstance(error, cls):
            return kind
    return INTERNAL


def client_message(error: BaseException) -> str:
    """What a client may read: our own sentences, but nothing of an unexpected exception."""
    if isinstance(error, HybridJaxError):
        return str(error)
    return f"the server failed with {type(error).__name__}; its log has the details"
