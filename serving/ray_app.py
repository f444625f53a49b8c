"""Replicas of a model behind one endpoint with OpenAI's API, by Ray Serve.

    hybrid-jax serve path/to/model --replicas 2
    serve run serving.ray_app:app model=path/to/model replicas=2

The first starts Ray here, or joins the cluster that RAY_ADDRESS names; the second is how Ray
deploys to a cluster, with the settings of `ServerConfig` as arguments. Every replica runs the
application of `http_api` with all its limits, keys and errors. Before them stands an ingress, which
reads a body and gives it to the replica that `PrefixRouter` prefers.
"""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybrid_jax.errors import EngineDead, HybridJaxError
from serving.config import ServerConfig, load_config
from serving.http_api.app import create_app
from serving.http_api.error_response import error_body, error_response
from serving.http_api.generation import DONE, EVENT_STREAM, sse
from serving.http_api.middleware import BodyLimit
from serving.logs import configure_logging
from serving.routing import preference, routing_key
from serving.server import load, running

logger = logging.getLogger(__name__)

REPLICA_HEADER = "X-Replica"  # which one answered
APPLICATION = "hybrid-jax"
UNLIMITED = 1_000_000  # requests at one replica: the engine's own queue is bounded, and says 429
BATCH = 16  # requests that a replica runs at once if max_num_seqs is chosen later
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string",
          "root_path", "headers", "client", "server")  # fmt: skip


@dataclass(frozen=True)
class Forwarded:
    """An HTTP request on its way to a replica."""

    scope: Scope
    body: bytes
    key: str  # requests with the same one should meet


class PrefixRouter(RequestRouter):
    """Sends requests with the same routing key to the same replica, unless that is too busy."""

    def initialize_state(self, lead: int = BATCH, **kwargs: Any) -> None:
        """`lead`: by how many requests a preferred replica may be ahead of the least busy one."""
        super().initialize_state(**kwargs)
        self._lead = lead

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The candidates in order of preference, for the `Forwarded` that is pending."""
        if pending_request is None:
            return [candidate_replicas]
        # If none of these can be reached, Ray is to wait before it asks again.
        pending_request.routing_context.should_backoff = True
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        known = self.replica_queue_len_cache
        queues = {name: known.get(each.replica_id) or 0 for name, each in replicas.items()}
        order = preference(pending_request.args[0].key, queues, self._lead)
        return [[replicas[name]] for name in order]


class Replica:
    """One copy of the model, with an engine and an application of its own."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Loads the model and compiles its steps. `settings` are those of `ServerConfig`."""
        self._stack = ExitStack()
        config = load_config(settings)
        configure_logging(config.log_level)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._context = self._stack.enter_context(running(*load(config)))
        self._app: ASGIApp = create_app(self._context)

    async def answer(self, request: Forwarded) -> AsyncIterator[list[Message]]:
        """The messages of the application's response; all that there are, each time."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()  # None: that was all
        unread = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()  # when the client goes, this task is cancelled
            return unread.pop()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REPLICA_HEADER] = self._name
                del headers["X-Request-Id"]  # Ray's proxy adds it, the same
            sent.put_nowait(message)

        task = asyncio.ensure_future(self._app(dict(request.scope), receive, send))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            messages: list[Message | None] = []
            while None not in messages:
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                yield [message for message in messages if message is not None]
        finally:
            task.cancel()

    def check_health(self) -> None:
        """Raises when the engine makes no progress; Ray then starts another replica."""
        if (problem := self._context.watchdog.problem()) is not None:
            raise RuntimeError(problem)

    def __del__(self) -> None:
        self._stack.close()


class Ingress:
    """Takes requests from Ray's proxy and hands them on."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._app = BodyLimit(self._forward, max_body_bytes)

    async def __call__(self, request: Request) -> Response:
        """The response of a replica."""
        del request
        return _Passed(self._app)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]  # all of it, by BodyLimit
        kept = {name: scope[name] for name in _SCOPE if name in scope}
        key = routing_key(body) or uuid4().hex
        answer: Any = self._replicas.remote(Forwarded(kept, body, key))
        start: Message | None = None
        try:
            async for messages in answer:
                for message in messages:
                    start = start or message
                    await send(message)
        except RayActorError as error:
            logger.warning("a replica died while it answered", exc_info=error)
            died = EngineDead("the replica that answered died; send the request again")
            if start is None:
                await error_response(died)(scope, receive, send)
            elif not Headers(raw=start["headers"])["content-type"].startswith(EVENT_STREAM):
                raise
            else:
                events = (sse(error_body(died)) + DONE).encode()
                await send({"type": "http.response.body", "body": events, "more_body": False})
        finally:
            answer.cancel()


class _Passed(Response):
    """A response that an ASGI application writes."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def app(settings: Mapping[str, Any]) -> Application:
    """The application that `serve run` and `serve deploy` start.

    Raises:
        ValueError: `settings` are none of `ServerConfig`.
    """
    config = load_config(settings)
    resources = {"CPU": 1.0, **config.replica_resources}
    both: dict[str, Any] = {
        "max_ongoing_requests": UNLIMITED,
        "graceful_shutdown_timeout_s": config.drain_seconds,
    }
    replicas = serve.deployment(
        **both,
        num_replicas=config.replicas,
        ray_actor_options={
            "num_cpus": resources.pop("CPU"),
            "num_gpus": resources.pop("GPU", 0.0),
            "resources": resources,
        },
        request_router_config={
            "request_router_class": PrefixRouter,
            "request_router_kwargs": {"lead": config.engine_options()["max_num_seqs"] or BATCH},
        },
    )(Replica)
    ingress = serve.deployment(**both, ray_actor_options={"num_cpus": 0})(Ingress)
    bound = replicas.bind(config.model_dump(mode="json"))
    return ingress.bind(bound, config.max_body_bytes)


def run_replicas(config: ServerConfig) -> int:
    """Serves until SIGTERM or SIGINT; the process's exit code. Joins or starts a Ray cluster.

    Raises OSError if the port cannot be used.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    port = _usable_port(config.host, config.http_port)
    ray.init(include_dashboard=False)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        serve.start(http_options=_http_options(config, port))
        _deploy(config)
        scheme = "http" if config.tls_cert_file is None else "https"
        logger.info("listening", extra={"url": f"{scheme}://{config.host}:{port}"})
        stop.wait()
        logger.info("shutting down")
    finally:
        serve.shutdown()
        ray.shutdown()
    logger.info("stopped")
    return 0


def _deploy(config: ServerConfig) -> None:
    """Returns when all replicas can answer. Raises HybridJaxError if they do not start."""
    try:
        serve.run(app(config.model_dump(mode="json")), name=APPLICATION)
    except RuntimeError:
        status = serve.status().applications[APPLICATION].deployments[Replica.__name__]
        reason = status.message.splitlines()[-1]  # of a traceback
        raise HybridJaxError(f"the replicas do not start: {reason}") from None


def _usable_port(host: str, port: int) -> int:
    """`port`, or a free one if that is 0. Raises OSError if something else listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as taken:
        return taken.getsockname()[1]


def _http_options(config: ServerConfig, port: int) -> HTTPOptions:
    key, certificate = config.tls_key_file, config.tls_cert_file
    return HTTPOptions(
        host=config.host,
        port=port,
        ssl_keyfile=None if key is None else str(key),
        ssl_certfile=None if certificate is None else str(certificate),
    )
