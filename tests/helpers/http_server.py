"""A server in this process, on an engine that outlives it."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from serving.async_engine import AsyncEngine
from serving.config import load_config
from serving.context import ServerContext
from serving.http_api.app import create_app
from serving.http_api.front import HttpFront
from serving.metrics import Metrics
from serving.watchdog import Watchdog

T = TypeVar("T")
MODEL = "lara-kjv"


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 60.0) -> T:
        """The result of a coroutine that runs there."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def close(self) -> None:
        """Stops the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class HttpServer:
    """An HTTP front on `engine`, on a free port. `settings` are those of `ServerConfig`."""

    def __init__(
        self,
        loop: LoopThread,
        engine: AsyncEngine,
        metrics: Metrics | None = None,
        **settings: Any,
    ) -> None:
        self._loop = loop
        self.config = load_config({"http_port": 0, **settings})
        self.watchdog = Watchdog(engine, stall_seconds=self.config.stall_seconds)
        self.context = ServerContext(
            engine, self.config, self.watchdog, metrics or Metrics(MODEL), MODEL
        )
        self.app = create_app(self.context)
        self._front = HttpFront(self.app, self.config)
        self.url = self._front.url
        loop.run(self._front.start())

    def close(self) -> None:
        """Stops serving; the engine goes on."""
        self._loop.run(self._front.stop())
