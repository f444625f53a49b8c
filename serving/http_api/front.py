"""Runs the application on a socket, under the process's own shutdown."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from serving.config import ServerConfig

FLUSH_SECONDS = 5  # for responses that are on their way when all requests have ended


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process, which has more than one server to stop."""
        yield


class HttpFront:
    """The HTTP server of a process."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        """Binds the socket. Raises OSError when that is not possible."""
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self._socket = socket.create_server(
            (config.host, config.http_port), family=family, backlog=2048
        )
        scheme = "http" if config.tls_cert_file is None else "https"
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"{scheme}://{host}:{self._socket.getsockname()[1]}"
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=FLUSH_SECONDS,
                ssl_certfile=config.tls_cert_file,
                ssl_keyfile=config.tls_key_file,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once connections are answered."""
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended while it started")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Closes idle connections at once, busy ones when their response is out."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
