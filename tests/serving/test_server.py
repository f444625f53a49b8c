"""One process from start to end: signals, the engine's death, logs."""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from typing import Any

import httpx
import pytest

from hybrid_jax.engine.engine import Engine
from hybrid_jax.errors import HybridJaxError
from serving import server
from serving.config import load_config
from serving.http_api.front import HttpFront
from tests.helpers.engine_checks import assert_baseline, small_config
from tests.helpers.fake_runner import FULL, STATE, FakeRunner
from tests.helpers.server_process import server_process
from tests.serving.conftest import ENGINE_OPTIONS

SECRET = "Moses"  # in every prompt, so in no log


def toy_engine() -> tuple[Engine, FakeRunner]:
    runner = FakeRunner((FULL, STATE), (40, 4), small_config())
    return Engine(runner, None), runner


def serve_until_end(engine: Engine, actions: Any, **settings: Any) -> int:
    """The exit code of a server whose clients do `actions(url)`, in a thread."""
    urls: list[str] = []
    start = HttpFront.start

    async def start_and_act(front: HttpFront) -> None:
        await start(front)
        urls.append(front.url)
        thread = threading.Thread(target=actions, args=(front.url,))
        thread.start()

    HttpFront.start = start_and_act  # type: ignore[method-assign]
    try:
        config = load_config({"http_port": 0, **settings})
        return asyncio.run(server.serve(engine, None, config, "toy"))
    finally:
        HttpFront.start = start  # type: ignore[method-assign]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_end_and_the_process_too(number: signal.Signals) -> None:
    engine, runner = toy_engine()
    answers: list[httpx.Response] = []

    def client(url: str) -> None:
        body = {"prompt": [3, 4], "max_tokens": 40, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(os.getpid(), number)
            response.read_lines = list(lines)  # type: ignore[attr-defined]
            answers.append(response)

    assert serve_until_end(engine, client) == 0
    (answer,) = answers
    lines = [line for line in answer.read_lines if line]  # type: ignore[attr-defined]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert_baseline(engine, runner)


def test_the_death_of_the_engine_ends_the_process_with_code_1() -> None:
    engine, runner = toy_engine()
    answers: list[httpx.Response] = []

    def client(url: str) -> None:
        runner.launch_error = RuntimeError("device lost")
        runner.reset_error = RuntimeError("still lost")
        answers.append(httpx.post(f"{url}/v1/completions", json={"prompt": [3], "max_tokens": 2}))

    assert serve_until_end(engine, client) == 1
    (answer,) = answers
    assert answer.status_code in (500, 503) and answer.json()["error"]["type"] == "server_error"


def test_a_port_in_use_is_an_os_error() -> None:
    engine, _ = toy_engine()
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = load_config({"http_port": other.getsockname()[1]})
        with pytest.raises(OSError, match="in use"):
            asyncio.run(server.serve(engine, None, config, "toy"))


def test_a_port_in_use_is_said_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "load", lambda config: pytest.fail("it loads"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name in ("http_port", "grpc_port"):
            config = load_config({"http_port": 0, name: port})
            with pytest.raises(OSError, match=f"{name} {port} of host 127.0.0.1.*choose another"):
                server.run_server(config)


def test_a_signal_before_it_serves_ends_a_process_in_order() -> None:
    """While it loads or compiles, in steps that nothing has cached."""
    with server_process("--row-buckets", "3", "--max-num-seqs", "3") as process:
        while not any('"settings"' in line for line in process.lines):
            assert process.process.poll() is None
            threading.Event().wait(0.01)
        process.terminate()
        assert process.wait() == 0
    *_, last = process.logs()
    assert (last["message"], last["signal"]) == ("stopped before it served", "SIGTERM")


def test_a_process_drains_and_aborts_and_tells_every_client() -> None:
    flags = [
        part
        for name, value in ENGINE_OPTIONS.items()
        for one in (value if isinstance(value, tuple) else (value,))
        for part in (f"--{name.replace('_', '-')}", str(one))
    ]
    flags += ["--dtype", "float32", "--drain-seconds", "0.3"]
    ends: list[list[str]] = []

    def read(url: str, max_tokens: int) -> None:
        body = {"prompt": SECRET, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = [line[6:] for line in response.iter_lines() if line]
        chunks = [json.loads(line) for line in lines[:-1]]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        ends.append([r for r in reasons if r] + [lines[-1]])

    with server_process(*flags) as process:
        url = process.wait_until_listening()
        readers = [threading.Thread(target=read, args=(url, n)) for n in (2, 490, 490, 490, 490)]
        for reader in readers:
            reader.start()
        while not ends:  # the short one has ended, the others run
            threading.Event().wait(0.01)
        process.terminate()
        for reader in readers:
            reader.join()
        assert process.wait() == 0
        assert ends[0] == ["length", "[DONE]"]
        assert all(len(end) == 2 and end[1] == "[DONE]" for end in ends)
        assert "abort" in {end[0] for end in ends}
    records = process.logs()
    settings = next(record["settings"] for record in records if record["message"] == "settings")
    assert settings["max_num_seqs"] == 8 and settings["drain_seconds"] == 0.3
    answered = [r for r in records if r["logger"] == "serving.access"]
    assert len(answered) == 5 and all(r["request_id"] and r["status"] == 200 for r in answered)
    assert SECRET not in json.dumps(records)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "serving.ray_app", None)
    with pytest.raises(HybridJaxError, match=r'pip install "hybrid-jax\[ray\]"') as caught:
        server.run_server(load_config({"replicas": 2}))
    assert "\n" not in str(caught.value)
