"""GET /server_info: layers, caches, kernels, settings."""

from fastapi import APIRouter

from serving.http_api.context import Server
from serving.server_info import ServerInfo, server_info

router = APIRouter()


@router.get("/server_info")
async def get_server_info(server: Server) -> ServerInfo:
    """What runs here, and how full its caches are."""
    return server_info(server.engine, server.model_name)
