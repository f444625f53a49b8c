"""GET /health and /ready, for whoever watches over the process."""

from fastapi import APIRouter, Response
from pydantic import BaseModel

from serving.http_api.context import Server

router = APIRouter()


class Health(BaseModel):
    """`ok`, or what is wrong."""

    status: str


@router.get("/health", responses={503: {"model": Health}})
async def health(server: Server, response: Response) -> Health:
    """Whether the engine makes progress; if not, the process should be restarted."""
    return _answer(server.watchdog.problem(), response)


@router.get("/ready", responses={503: {"model": Health}})
async def ready(server: Server, response: Response) -> Health:
    """Whether requests should be sent here: healthy, and not shutting down."""
    problem = server.watchdog.problem()
    if problem is None and not server.engine.accepting:
        problem = "the server is shutting down"
    return _answer(problem, response)


def _answer(problem: str | None, response: Response) -> Health:
    if problem is not None:
        response.status_code = 503
    return Health(status=problem or "ok")
