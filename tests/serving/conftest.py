"""The bundled model behind an `AsyncEngine`, and HTTP and gRPC servers on it."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.bundled import bundled_model
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.llm import connect
from serving.async_engine import AsyncEngine
from serving.metrics import Metrics
from tests.helpers.grpc_server import GrpcServer
from tests.helpers.http_server import MODEL, HttpServer, LoopThread

ENGINE_OPTIONS = {
    "max_num_seqs": 8,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "row_buckets": (8,),
    "token_buckets": (64,),
    "max_queue": 256,
    "max_logprobs": 5,
}


class Bundled(NamedTuple):
    """The engine from three sides."""

    served: AsyncEngine
    engine: Engine
    metrics: Metrics


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def bundled() -> Iterator[Bundled]:
    """One engine for all tests; each of them leaves it idle."""
    engine, tokenizer = connect(bundled_model(), dtype="float32", engine_options=ENGINE_OPTIONS)
    engine.add_request(Request("warm-up", (5, 6), SamplingParams(max_tokens=2)))
    while engine.has_work():  # compiles, so that no test waits for it
        engine.step()
    metrics = Metrics(MODEL)
    served = AsyncEngine(engine, tokenizer, observers=(metrics.observe,))
    metrics.watch(served)
    served.start()
    yield Bundled(served, engine, metrics)
    served.close()


@pytest.fixture
def serve_bundled(bundled: Bundled, loop_thread: LoopThread) -> Iterator[Callable[..., HttpServer]]:
    """`serve_bundled(**settings)`: a server of the bundled model with those settings."""
    servers: list[HttpServer] = []

    def start(**settings: Any) -> HttpServer:
        servers.append(HttpServer(loop_thread, bundled.served, bundled.metrics, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
    assert_idle(bundled.engine)


@pytest.fixture
def serve_grpc(bundled: Bundled, loop_thread: LoopThread) -> Iterator[Callable[..., GrpcServer]]:
    """`serve_grpc(**settings)`: the same over gRPC."""
    servers: list[GrpcServer] = []

    def start(**settings: Any) -> GrpcServer:
        servers.append(GrpcServer(loop_thread, bundled.served, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
    assert_idle(bundled.engine)


def assert_idle(engine: Engine) -> None:
    """Waits until nothing runs; then nothing is held."""
    for _ in range(2000):
        if not engine.has_work():
            break
        threading.Event().wait(0.01)
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert [group.used for group in stats.caches] == [0] * len(stats.caches)
    engine.check_integrity()
