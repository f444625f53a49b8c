"""Structured logs: one JSON object a line on stderr, with the id of the request they are about."""

import logging
from contextvars import ContextVar

from pythonjsonlogger.json import JsonFormatter

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the request that the current task serves."""


def configure_logging(level: str) -> None:
    """Sends all loggers' records from `level` on to stderr as JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter(
            "{levelname}{name}{message}",
            style="{",
            rename_fields={"levelname": "level", "name": "logger"},
            timestamp="time",
        )
    )
    handler.addFilter(_add_request_id)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _add_request_id(record: logging.LogRecord) -> bool:
    if (current := request_id.get()) is not None:
        record.request_id = current
    return True
