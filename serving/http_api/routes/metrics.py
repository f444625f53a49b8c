"""GET /metrics, for Prometheus."""

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client.exposition import choose_encoder

from serving.http_api.context import Server

router = APIRouter()


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, server: Server) -> Response:
    """All metrics, in the format that the client prefers."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(server.metrics.registry), media_type=content_type)
