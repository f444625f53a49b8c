"""Runs the service on a port, with health and reflection."""

import asyncio
from contextlib import suppress

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from serving.context import ServerContext
from serving.grpc_api import inference_pb2 as pb
from serving.grpc_api.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from serving.grpc_api.servicer import Servicer
from serving.grpc_api.status import ApiKeys
from serving.sessions import Sessions

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
FLUSH_SECONDS = 5.0  # for calls that are on their way when all requests have ended
HEALTH_SECONDS = 0.5  # between two looks at the engine


class GrpcFront:
    """The gRPC server of a process."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # set at run time
        self._server: grpc.aio.Server | None = None
        self._sessions = Sessions(context.engine, context.config)
        self._tasks: list[asyncio.Task[None]] = []
        self.url = ""

    async def start(self) -> None:
        """Returns once calls are answered. Raises OSError if the port or a file cannot be used."""
        config = self._context.config
        keys = config.api_keys()
        self._server = grpc.aio.server(
            interceptors=[ApiKeys(keys)] if keys else [],
            options=[
                ("grpc.max_receive_message_length", config.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # or a second server would share the port unnoticed
            ],
        )
        servicer = Servicer(self._context, self._sessions)
        add_InferenceServiceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        host = f"[{config.host}]" if ":" in config.host else config.host
        port = self._listen(self._server, f"{host}:{config.grpc_port}")
        self.url = f"{'grpc' if config.tls_cert_file is None else 'grpcs'}://{host}:{port}"
        await self._report()
        await self._server.start()
        watchers = (self._keep_reporting(), self._sessions.close_idle())
        self._tasks = [asyncio.create_task(watcher) for watcher in watchers]

    async def stop(self) -> None:
        """Refuses new calls, and returns when those under way are answered. Idempotent."""
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(FLUSH_SECONDS)
        await self._sessions.close_all()

    def _listen(self, server: grpc.aio.Server, address: str) -> int:
        certificate, key = self._context.config.tls_cert_file, self._context.config.tls_key_file
        try:
            if certificate is None or key is None:
                return server.add_insecure_port(address)
            pair = (key.read_bytes(), certificate.read_bytes())
            return server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {address}: {error}") from error

    async def _report(self) -> None:
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if self._context.healthy() else status.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, value)

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            await self._report()
