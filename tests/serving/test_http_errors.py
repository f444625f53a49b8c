"""Every mistake of a client has one answer, in OpenAI's shape, and costs nobody else anything."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.http_server import HttpServer, LoopThread
from tests.helpers.stalled_engine import stalled_engine
from tests.serving.conftest import Bundled

Serve = Callable[..., HttpServer]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response that must have `status`."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def post(server: HttpServer, body: Any, path: str = "/v1/completions", **options: Any) -> Any:
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    headers = {"content-type": "application/json", **options.pop("headers", {})}
    return httpx.post(server.url + path, content=body, headers=headers, timeout=60, **options)


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


CHAT: Any = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("completions", b"{bad", "quotes at character 1); send a JSON object"),
        ("completions", b"[1]", "JSON object"),
        ("completions", b"\xff\xfe", ""),
        ("completions", b"[" * 100_000, ""),
        ("completions", b'{"prompt": "\\ud800"}', "surrogates"),
        ("completions", b'{"\\ud800": 1, "prompt": "a"}', "unicode"),
        ("completions", b'{"prompt": "a", "temperature": NaN}', "temperature"),
        ("completions", b'{"prompt": "a", "max_tokens": 1e400}', "max_tokens"),
        ("completions", {"prompt": "a", "temperatur": 1}, "temperatur"),
        ("completions", {}, "prompt"),
        ("completions", {"prompt": ""}, "empty"),
        ("completions", {"prompt": []}, "at least one"),
        ("completions", {"prompt": [[]]}, "empty"),
        ("completions", {"prompt": [5, 2048]}, "outside the vocabulary"),
        ("completions", {"prompt": [5, 2**70]}, "outside the vocabulary"),
        ("completions", {"prompt": [True, False]}, "prompt"),
        ("completions", {"prompt": ["a"] * 65}, "max_prompts"),
        ("completions", {"prompt": "a" * 9000}, "max_model_len is 512"),
        ("completions", {"prompt": "a", "n": 17}, "max_n is 16"),
        ("completions", {"prompt": "a", "best_of": 17}, "best_of is 17 but max_n is 16"),
        ("completions", {"prompt": "a", "best_of": 2, "stream": True}, "cannot be streamed"),
        ("completions", {"prompt": "a", "n": 0}, "n must be at least 1"),
        ("completions", {"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ("completions", {"prompt": "a", "stop": ""}, "stop"),
        ("completions", {"prompt": "a", "logprobs": 6}, "max_logprobs"),
        ("completions", {"prompt": "a", "echo": True, "logprobs": 6}, "max_logprobs"),
        ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ("completions", {"prompt": "a", "logit_bias": {"2048": 1}}, "2048"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": [5] * 12, "max_tokens": 501}, "ask for at most 500"),
        ("chat/completions", CHAT | {"max_completion_tokens": 512}, "max_model_len 512; ask for"),
        ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream: true"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", b'{"messages": [{"role": "\\udc00", "content": "a"}]}', "surrogates"),
        ("chat/completions", CHAT | {"top_logprobs": 2}, "logprobs: true"),
        ("chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice"),
        ("chat/completions", CHAT | {"response_format": {"type": "xml"}}, "response_format"),
        ("chat/completions", CHAT | {"response_format": {"type": "json_schema"}}, "json_schema"),
        (
            "chat/completions",
            CHAT | {"response_format": schema_format({"type": "strange"})},
            "strange",
        ),
        ("completions", {"prompt": "a", "structured_outputs": {"regex": "("}}, "regex"),
        ("completions", {"prompt": "a", "structured_outputs": {}}, "exactly one"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "content",
        ),
        ("chat/completions", CHAT | {"chat_template_kwargs": {"messages": 1}}, "messages"),
        ("chat/completions", CHAT | {"chat_template_kwargs": {"chat_template": "x"}}, "fixed"),
    ],
)
def test_a_bad_request_is_one_sentence(
    serve_bundled: Serve, path: str, body: Any, said: str
) -> None:
    error = error_of(post(serve_bundled(), body, f"/v1/{path}"), 400)
    assert error["type"] == "invalid_request_error" and said in error["message"]
    assert "Traceback" not in error["message"] and len(error["message"]) < 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/detokenize", {"tokens": [2048]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
    ],
)
def test_bad_tokens_are_refused(serve_bundled: Serve, path: str, body: Any) -> None:
    error_of(post(serve_bundled(), body, path), 400)


def test_text_goes_to_tokens_and_back(serve_bundled: Serve) -> None:
    server = serve_bundled()
    text = "In the beginning\x00 God \u00e9\U0001f600"
    body = {"prompt": text, "add_special_tokens": False}
    tokens = post(server, body, "/tokenize").json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 512
    assert post(server, {"tokens": tokens["tokens"]}, "/detokenize").json() == {"prompt": text}
    chat = post(server, CHAT, "/tokenize").json()["tokens"]
    assert post(server, {"tokens": chat}, "/detokenize").json()["prompt"].endswith("<|assistant|>")


def test_unknown_routes_and_methods(serve_bundled: Serve) -> None:
    server = serve_bundled()
    error_of(httpx.get(f"{server.url}/v1/nothing"), 404)
    error_of(httpx.get(f"{server.url}/v1/completions"), 405)


@pytest.mark.parametrize("size", [100_001, 10_000_000])
def test_a_body_that_is_too_long_is_refused(serve_bundled: Serve, size: int) -> None:
    server = serve_bundled(max_body_bytes=100_000)
    error = error_of(post(server, b'{"prompt": "' + b"a" * size + b'"}'), 413)
    assert "max_body_bytes" in error["message"]
    assert post(server, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_request_id_comes_back(serve_bundled: Serve) -> None:
    server = serve_bundled()
    response = httpx.get(f"{server.url}/health", headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    for bad in ("", "x" * 129, "a\tb"):
        response = httpx.get(f"{server.url}/health", headers={"X-Request-Id": bad})
        assert response.headers["x-request-id"] != bad


def test_only_who_has_a_key_comes_in(serve_bundled: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first-key\n\n  second-key \n")
    server = serve_bundled(api_key_file=file)
    body = {"prompt": "a", "max_tokens": 1}
    for key in ("first-key", "second-key"):
        assert post(server, body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    for value in (None, "Bearer wrong", "Bearer", "Basic first-key", "first-key"):
        headers = {"Authorization": value} if value is not None else {}
        response = post(server, body, headers=headers)
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    odd = [(b"Authorization", b"Bearer schl\xfcssel")]
    assert httpx.get(f"{server.url}/v1/models", headers=odd).status_code == 401
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_key_file_without_a_key_is_refused(serve_bundled: Serve, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(ValueError, match="has no API key"):
        serve_bundled(api_key_file=tmp_path / "keys")


def test_a_full_queue_says_when_to_come_back(loop_thread: LoopThread) -> None:
    with stalled_engine(max_queue=2, max_num_seqs=1) as (served, release):
        server = HttpServer(loop_thread, served)
        results: list[httpx.Response] = []
        body = {"prompt": [3, 4], "max_tokens": 2}

        def ask() -> None:
            results.append(post(server, body))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        while sum(r.status_code == 429 for r in results) < 3:  # at most three fit
            assert all(r.status_code == 429 for r in results)
            threading.Event().wait(0.01)
        release()
        for thread in threads:
            thread.join()
        refused = [r for r in results if r.status_code == 429]
        assert len(refused) >= 3 and len(results) == 6
        assert {r.status_code for r in results} == {200, 429}
        for response in refused:
            assert error_of(response, 429)["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1
        server.close()


def test_a_stalled_engine_is_not_healthy(
    loop_thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    with stalled_engine() as (served, release):
        server = HttpServer(loop_thread, served, stall_seconds=0.2)
        server.watchdog.start()
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        task = threading.Thread(target=post, args=(server, {"prompt": [3], "max_tokens": 1}))
        task.start()
        while httpx.get(f"{server.url}/health").status_code == 200:
            threading.Event().wait(0.01)
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert "no step has completed" in httpx.get(f"{server.url}/health").json()["status"]
        while not caplog.records:
            threading.Event().wait(0.01)
        stacks = "\n".join(caplog.records[0].stacks)  # type: ignore[attr-defined]
        assert "stalled_engine.py" in stacks  # where the engine thread stands
        release()
        task.join()
        while httpx.get(f"{server.url}/health").status_code == 503:
            threading.Event().wait(0.01)
        server.watchdog.stop()
        server.close()


def test_an_error_of_the_engine_is_the_clients_answer(loop_thread: LoopThread) -> None:
    with stalled_engine() as (served, release):
        server = HttpServer(loop_thread, served)
        runner: Any = served._engine._runner
        runner.launch_error = MemoryError("out of memory on the device")
        release()
        error = error_of(post(server, {"prompt": [3], "max_tokens": 4}), 500)
        assert error["type"] == "server_error" and "out of memory" in error["message"]
        runner.unusable_uids.add(2)
        error = error_of(post(server, {"prompt": [3], "max_tokens": 4}), 400)
        assert "no token is left to sample" in error["message"]
        runner.read_error = MemoryError("again")
        stream = post(server, {"prompt": [3], "max_tokens": 4, "stream": True})
        assert stream.status_code == 200 and stream.text.endswith("data: [DONE]\n\n")
        events = [json.loads(line[6:]) for line in stream.text.splitlines()[:-1] if "{" in line]
        assert "again" in events[-1]["error"]["message"]
        assert post(server, {"prompt": [3], "max_tokens": 4}).status_code == 200
        server.close()


def test_who_goes_away_frees_what_he_held(serve_bundled: Serve, bundled: Bundled) -> None:
    server = serve_bundled()
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.05)
    url, streamed = f"{server.url}/v1/completions", body | {"stream": True}
    with httpx.stream("POST", url, json=streamed, timeout=60) as response:
        next(response.iter_lines())
    engine = bundled.engine
    steps = engine.stats().steps
    while engine.has_work():
        threading.Event().wait(0.005)
    assert engine.stats().steps - steps < 400  # neither ran to its end
