"""Both fronts prepare a grammar, which may take seconds, in a thread and not in their loop."""

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from hybrid_jax.engine.engine import Engine
from hybrid_jax.structured import GrammarCompiler
from serving.async_engine import AsyncEngine
from serving.client import Client
from serving.grpc_api import inference_pb2 as pb
from tests.helpers.grpc_server import GrpcServer
from tests.helpers.http_server import HttpServer, LoopThread


def by_http(server: HttpServer, regex: str) -> str:
    body = {"prompt": "a", "max_tokens": 9, "structured_outputs": {"regex": regex}}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    return answer["choices"][0]["text"]


def by_grpc(server: GrpcServer, regex: str) -> str:
    with Client(server.address) as client:
        structured = pb.StructuredOutput(regex=regex)
        return client.generate("a", max_tokens=9, structured=structured).completions[0].text


FRONTS: dict[str, tuple[Any, Callable[[Any, str], str]]] = {
    "http": (HttpServer, by_http),
    "grpc": (GrpcServer, by_grpc),
}


@pytest.mark.parametrize("name", FRONTS)
def test_the_first_use_of_a_grammar_is_in_a_thread(
    name: str,
    bundled: tuple[AsyncEngine, Engine],
    loop_thread: LoopThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, complete = FRONTS[name]
    matcher, threads = GrammarCompiler.matcher, list[threading.Thread]()

    def note(compiler: GrammarCompiler, *arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return matcher(compiler, *arguments, **options)

    monkeypatch.setattr(GrammarCompiler, "matcher", note)
    server = make(loop_thread, bundled[0])
    assert complete(server, "yes|no") in ("yes", "no")
    server.close()
    assert threads[0] is not loop_thread._thread
