"""How routes get at the server they belong to."""

from typing import Annotated, Any

from fastapi import Depends, Request

from serving.context import ServerContext


def _context(request: Request) -> Any:
    return request.app.state.context


Server = Annotated[ServerContext, Depends(_context)]
