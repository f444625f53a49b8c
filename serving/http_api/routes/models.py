"""GET /v1/models: the one model."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from serving.context import ServerContext
from serving.http_api.context import Server

router = APIRouter()


class ModelCard(BaseModel):
    """A model that can be asked for."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "hybrid-jax"
    max_model_len: int


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get("/v1/models")
async def list_models(server: Server) -> ModelList:
    """The model that this server has."""
    return ModelList(data=[_card(server)])


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, server: Server) -> ModelCard:
    """The model by name."""
    server.check_model(name)
    return _card(server)


def _card(server: ServerContext) -> ModelCard:
    return ModelCard(
        id=server.model_name,
        created=server.started,
        max_model_len=server.engine.config.max_model_len,
    )
