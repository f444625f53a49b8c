"""A gRPC front in this process, on an engine that outlives it."""

from typing import Any

from serving.async_engine import AsyncEngine
from serving.config import load_config
from serving.context import ServerContext
from serving.grpc_api.front import GrpcFront
from serving.metrics import Metrics
from serving.watchdog import Watchdog
from tests.helpers.http_server import MODEL, LoopThread


class GrpcServer:
    """A gRPC front on `engine`, on a free port. `settings` are those of `ServerConfig`."""

    def __init__(self, loop: LoopThread, engine: AsyncEngine, **settings: Any) -> None:
        self._loop = loop
        config = load_config({"grpc_port": 0, **settings})
        watchdog = Watchdog(engine, stall_seconds=config.stall_seconds)
        self.front = GrpcFront(ServerContext(engine, config, watchdog, Metrics(MODEL), MODEL))
        loop.run(self.front.start())
        self.address = self.front.url.split("//")[1]

    def close(self) -> None:
        """Stops serving; the engine goes on."""
        self._loop.run(self.front.stop())
