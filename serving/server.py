"""One process: the engine thread, its fronts, and an orderly end."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from hybrid_jax.bundled import bundled_model
from hybrid_jax.engine.engine import Engine
from hybrid_jax.errors import HybridJaxError
from hybrid_jax.llm import connect
from hybrid_jax.tokenizer import HFTokenizer
from serving.async_engine import AsyncEngine, Observer
from serving.config import ServerConfig
from serving.context import ServerContext
from serving.grpc_api.front import GrpcFront
from serving.http_api.app import create_app
from serving.http_api.front import HttpFront
from serving.metrics import Metrics
from serving.tracing import RequestTracer, otlp_provider
from serving.watchdog import Watchdog

logger = logging.getLogger(__name__)


class Front(Protocol):
    """A way for clients to reach the engine."""

    @property
    def url(self) -> str:
        """Where it listens."""
        ...

    async def start(self) -> None:
        """Returns once clients are answered."""
        ...

    async def stop(self) -> None:
        """Returns once what was to be answered is answered."""
        ...


def run_server(config: ServerConfig) -> int:
    """Loads the model and serves it until SIGTERM or SIGINT; the process's exit code.

    Raises:
        ModelError: the model cannot be run. OSError: a port or file cannot be used.
        ValueError: settings contradict the model.
    """
    logger.info("settings", extra={"settings": config.model_dump(mode="json")})
    _check_ports(config)
    if config.replicas > 1:
        return _run_replicas(config)
    return asyncio.run(serve(*load(config)))


def load(config: ServerConfig) -> tuple[Engine, HFTokenizer | None, ServerConfig, str]:
    """The arguments of `serve`. Raises as `run_server` does."""
    path = config.model or bundled_model()
    engine, tokenizer = connect(path, dtype=config.dtype, engine_options=config.engine_options())
    return engine, tokenizer, config, config.served_model_name or Path(path).resolve().name


def _check_ports(config: ServerConfig) -> None:
    """Raises OSError if a port cannot be listened on, before the model is loaded in vain."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    for name in ("http_port", "grpc_port"):
        port = getattr(config, name)
        try:
            socket.create_server((config.host, port or 0), family=family).close()
        except OSError as error:
            raise OSError(
                f"{name} {port} of host {config.host} cannot be listened on "
                f"({error.strerror}); choose another"
            ) from error


def _run_replicas(config: ServerConfig) -> int:
    try:
        from serving.ray_app import run_replicas
    except ModuleNotFoundError as error:
        raise HybridJaxError(
            f"replicas is {config.replicas} but {error.name} is not installed; "
            'pip install "hybrid-jax[ray]"'
        ) from None
    return run_replicas(config)


@contextmanager
def running(
    engine: Engine,
    tokenizer: HFTokenizer | None,
    config: ServerConfig,
    model_name: str,
    *,
    on_death: Callable[[], object] = lambda: None,
) -> Iterator[ServerContext]:
    """What fronts need, with the engine thread and the watchdog at work; they end with the block.

    `on_death` is called in the engine thread when that gives up.
    """
    metrics = Metrics(model_name)
    observers: list[Observer] = [metrics.observe]
    provider = otlp_provider(config.otlp_endpoint) if config.otlp_endpoint else None
    if provider is not None:
        observers.append(RequestTracer(provider, model_name))
    served = AsyncEngine(engine, tokenizer, observers=observers, on_death=on_death)
    metrics.watch(served)
    watchdog = Watchdog(served, stall_seconds=config.stall_seconds)
    served.start()
    watchdog.start()
    try:
        yield ServerContext(served, config, watchdog, metrics, model_name)
    finally:
        watchdog.stop()
        served.close()
        if provider is not None:
            provider.shutdown()  # sends what is left


async def serve(
    engine: Engine, tokenizer: HFTokenizer | None, config: ServerConfig, model_name: str
) -> int:
    """Serves `engine`, which it owns, until a signal or the engine's death.

    On a signal no request is accepted any more; those under way have `drain_seconds` to end, then
    they are aborted, and every client gets its final event. A second signal ends the process at
    once. Returns 0, or 1 if the engine died.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal(number: int) -> None:
        logger.info("shutting down", extra={"signal": signal.Signals(number).name})
        stop.set()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)

    def on_death() -> None:
        loop.call_soon_threadsafe(stop.set)

    with running(engine, tokenizer, config, model_name, on_death=on_death) as context:
        fronts: list[Front] = [HttpFront(create_app(context), config)]
        if config.grpc_port is not None:
            fronts.append(GrpcFront(context))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        try:
            for front in fronts:
                await front.start()
                logger.info("listening", extra={"url": front.url, "model": model_name})
            await stop.wait()
            await context.engine.drain(config.drain_seconds)
        finally:
            for front in fronts:
                await front.stop()
    logger.info("stopped")
    return 1 if context.engine.death is not None else 0
