"""The gRPC server through its client, on the bundled model: what it answers and what it frees."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hybrid_jax import SamplingParams
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.errors import StepFailed
from serving import server
from serving.async_engine import AsyncEngine
from serving.client import AsyncClient, Client
from serving.config import load_config
from serving.grpc_api import inference_pb2 as pb
from serving.grpc_api.front import SERVICE, GrpcFront
from serving.grpc_api.status import PUSHBACK
from tests.helpers.engine_checks import assert_baseline, small_config
from tests.helpers.fake_runner import FULL, STATE, FakeRunner
from tests.helpers.grpc_server import GrpcServer
from tests.helpers.http_server import MODEL, LoopThread
from tests.helpers.stalled_engine import StepGate, heard_abort, stalled_engine
from tests.serving.conftest import ENGINE_OPTIONS

Code = grpc.StatusCode
Bundled = tuple[AsyncEngine, Engine]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
PROMPT = "And it came to pass"
SECONDS = 30.0  # only a broken test takes so long


@pytest.fixture
def client(serve_grpc: Callable[..., GrpcServer]) -> Iterator[Client]:
    with Client(serve_grpc().address) as client:
        yield client


def in_engine(bundled: Bundled, prompt: str | list[int], **options: Any) -> Any:
    """What the engine, asked directly, gives for a prompt."""
    served = bundled[0]
    ids = served.require_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    request = Request("direct", tuple(ids), SamplingParams(**options))

    async def collect() -> Any:
        return await served.generate(request).collect()

    return asyncio.run(collect())


def refusal(call: Callable[[], Any], code: grpc.StatusCode, words: str) -> grpc.RpcError:
    """The error of a call that must fail with `code` and say `words`, in one line."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    assert error.code() is code, error
    assert re.search(words, error.details()) and "\n" not in error.details()
    return error


def test_a_stream_has_the_tokens_of_the_engine_and_ends_once(
    client: Client, bundled: Bundled
) -> None:
    options = {"n": 2, "temperature": 0.9, "seed": 3, "max_tokens": 20, "logprobs": 2}
    expected = in_engine(bundled, PROMPT, **options)
    events = list(client.stream(PROMPT, **options))
    assert [event.HasField("usage") for event in events] == [False] * (len(events) - 1) + [True]
    usage = events[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
    )
    for completion in expected.outputs:
        own = [event for event in events if event.index == completion.index]
        assert [token for event in own for token in event.token_ids] == completion.token_ids
        assert "".join(event.text for event in own) == completion.text
        entries = [entry for event in own for entry in event.logprobs]
        for entry, direct in zip(entries, completion.logprobs, strict=True):
            assert entry.token_id == direct.token_id
            assert entry.logprob == pytest.approx(direct.logprob, abs=1e-3)
            assert [top.token_id for top in entry.top] == list(direct.top)
        ends = [event.finish_reason for event in own if event.finish_reason]
        assert ends == [own[-1].finish_reason]
        assert own[-1].HasField("cache") and own[-1].cache.reason


def test_log_probabilities_of_a_prompt_come_once(client: Client, bundled: Bundled) -> None:
    """Of all its tokens but the first, with the first token or with the result."""
    options = GREEDY | {"n": 2, "prompt_logprobs": 2}
    want = in_engine(bundled, PROMPT, **options).prompt_logprobs
    told = [e.prompt_logprobs for e in client.stream(PROMPT, **options) if e.prompt_logprobs]
    assert len(told) == 1 and want[0] is None
    for entries in (*told, client.generate(PROMPT, **options).prompt_logprobs):
        for entry, direct in zip(entries, want[1:], strict=True):
            assert entry.token_id == direct.token_id
            assert entry.logprob == pytest.approx(direct.logprob, abs=1e-3)  # another batch
            assert len(entry.top) == len(direct.top) == 2


def test_the_best_of_many_come_whole_only(client: Client, bundled: Bundled) -> None:
    options = {"temperature": 1.0, "seed": 8, "max_tokens": 6}
    ranked = sorted(
        in_engine(bundled, PROMPT, n=4, logprobs=0, **options).outputs,
        key=lambda completion: -sum(entry.logprob for entry in completion.logprobs),
    )
    assert ranked[0].index or ranked[1].index != 1  # not in the order they come in
    got = client.generate(PROMPT, n=2, best_of=4, **options)
    assert [list(c.token_ids) for c in got.completions] == [c.token_ids for c in ranked[:2]]
    assert [c.index for c in got.completions] == [0, 1]
    with pytest.raises(grpc.RpcError, match="best_of=4 with n=2 cannot be streamed"):
        list(client.stream(PROMPT, n=2, best_of=4))


def test_texts_ids_and_conversations_are_prompts(client: Client, bundled: Bundled) -> None:
    tokenizer = bundled[0].require_tokenizer()
    messages = [{"role": "user", "content": "Who art thou?"}]
    _, ids = tokenizer.encode_chat(messages)
    assert client.tokenize(messages) == ids
    assert client.tokenize(PROMPT) == tokenizer.encode(PROMPT)
    assert client.detokenize(client.tokenize(PROMPT)) == PROMPT
    by_chat = client.generate(messages, **GREEDY).completions[0]
    by_ids = client.generate(ids, **GREEDY).completions[0]
    assert by_chat.token_ids == by_ids.token_ids
    assert by_ids.text == in_engine(bundled, ids, **GREEDY).outputs[0].text


def test_a_batch_answers_in_order(client: Client, bundled: Bundled) -> None:
    prompts = [f"{PROMPT} {word}" for word in ("in", "when", "that", "on", "after")]
    results = client.generate_batch(prompts, **GREEDY)
    for prompt, result in zip(prompts, results, strict=True):
        (expected,) = in_engine(bundled, prompt, **GREEDY).outputs
        assert result.completions[0].text == expected.text
        assert result.usage.completion_tokens == len(expected.token_ids)


def test_every_sampling_parameter_reaches_the_engine(client: Client, bundled: Bundled) -> None:
    options: dict[str, Any] = {
        "temperature": 0.75, "top_k": 40, "top_p": 0.875, "min_p": 0.0625, "seed": -5,
        "repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": -0.25,
        "max_tokens": 30, "min_tokens": 2, "stop": ["e t", "Lord"], "stop_token_ids": [9],
        "ignore_eos": True, "logit_bias": {70: 2.0}, "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }  # fmt: skip
    (expected,) = in_engine(bundled, PROMPT, **options).outputs
    (got,) = client.generate(PROMPT, **options).completions
    assert (list(got.token_ids), got.text) == (expected.token_ids, expected.text)
    stopped = got.stop_string if got.HasField("stop_string") else None
    assert stopped == expected.stop_reason
    assert not client.generate(PROMPT, **GREEDY, detokenize=False).completions[0].text
    token = in_engine(bundled, PROMPT, **GREEDY).outputs[0].token_ids[2]
    (ended,) = client.generate(PROMPT, **GREEDY, stop_token_ids=[token]).completions
    assert ended.stop_token_id == token and ended.finish_reason == pb.FINISH_REASON_STOP


def test_structured_output_of_every_kind(client: Client) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"maximum": 99, "type": "integer", "minimum": 0}},
        "additionalProperties": False,
    }
    kinds: dict[str, pb.StructuredOutput] = {
        r"\{.*\}": pb.StructuredOutput(json_schema=json.dumps(schema)),
        "[0-9]{3}": pb.StructuredOutput(regex="[0-9]{3}"),
        "yea|nay": pb.StructuredOutput(choice=pb.Choice(values=["yea", "nay"])),
        r"\(\)": pb.StructuredOutput(grammar='start: "(" ")"'),
    }
    for pattern, structured in kinds.items():
        (got,) = client.generate(PROMPT, structured=structured, seed=1, max_tokens=99).completions
        assert re.fullmatch(pattern, got.text, re.S), got
        assert got.finish_reason == pb.FINISH_REASON_STOP


def test_the_async_client_does_the_same(
    client: Client, serve_grpc: Callable[..., GrpcServer]
) -> None:
    async def test() -> None:
        async with AsyncClient(serve_grpc().address) as other:
            stream = [event async for event in other.stream(PROMPT, **GREEDY)]
            whole = await other.generate(PROMPT, **GREEDY)
            expected = client.generate(PROMPT, **GREEDY).completions[0].text
            assert "".join(event.text for event in stream) == expected
            assert whole.completions[0].text == expected
            ids = await other.tokenize(PROMPT)
            assert await other.detokenize(ids) == PROMPT
            assert not await other.abort("nobody")
            assert await other.model_info() == client.model_info()
            assert (await other.server_info()).versions == client.server_info().versions
            assert (await other.memory()).running == 0

    asyncio.run(test())


def test_it_describes_model_server_and_memory(client: Client, bundled: Bundled) -> None:
    model = client.model_info()
    kinds = ["linear", "window", "linear", "full", "window"]
    assert (model.name, model.model_type, model.vocab_size) == (MODEL, "lara_mini", 2048)
    assert [layer.kind for layer in model.layers] == kinds
    assert model.limits.max_model_len == ENGINE_OPTIONS["max_model_len"]
    assert model.has_tokenizer and model.has_chat_template
    info = client.server_info()
    assert list(info.row_buckets) == [8] and list(info.token_buckets) == [64]
    # Not a literal: tests that drop compiled programs make the session's engine trace again.
    assert info.compiled_steps == bundled[1].stats().compiles >= 2
    assert "jax" in info.versions
    kernels = {kernel.op: kernel for kernel in info.kernels}
    assert {"paged_attention", "gated_delta_rule", "causal_conv1d"} <= kernels.keys()
    kernel = kernels["paged_attention"]
    assert kernel.implementation and "[" in kernel.operands["q"] and kernel.device_kind
    memory = client.memory()
    assert {cache.name.split(":")[-1] for cache in memory.caches} == {
        "full", "window", "linear", "rows",
    }  # fmt: skip
    assert all(cache.used <= cache.total for cache in memory.caches)
    assert memory.recomputed_tokens == bundled.engine.stats().recomputed_tokens
    assert memory.swap.total_bytes == bundled.engine.config.swap_bytes


BAD: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, str]] = {
    "no prompt": (pb.GenerateRequest(), Code.INVALID_ARGUMENT, "there is no prompt"),
    "no messages": (
        pb.GenerateRequest(prompt=pb.Prompt(chat=pb.Chat())),
        Code.INVALID_ARGUMENT,
        "chat with messages",
    ),
    "empty": (pb.GenerateRequest(prompt=pb.Prompt(text="")), Code.INVALID_ARGUMENT, "is empty"),
    "no ids": (
        pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds())),
        Code.INVALID_ARGUMENT,
        "is empty",
    ),
    "large id": (
        pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[5, 2**32 - 1]))),
        Code.INVALID_ARGUMENT,
        "token id 4294967295 is outside",
    ),
    "model": (
        pb.GenerateRequest(prompt=pb.Prompt(text="a"), model="other"),
        Code.NOT_FOUND,
        "no model 'other'",
    ),
    "long": (
        pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[5] * 600))),
        Code.INVALID_ARGUMENT,
        "max_model_len is 512",
    ),
}
VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": -1.0}, "temperature must be in"),
    "NaN": ({"temperature": float("nan")}, "temperature must be in"),
    "n": ({"n": 17}, "max_n is 16"),
    "best_of": ({"best_of": 17, "n": 2}, "best_of is 17 but max_n is 16"),
    "tokens": ({"max_tokens": 0}, "max_tokens must be at least 1"),
    "room": ({"max_tokens": 512}, "max_model_len 512; ask for at most 5"),
    "bias": ({"logit_bias": {2048: 1.0}}, "logit_bias"),
    "empty structure": ({"structured": pb.StructuredOutput()}, "exactly one of"),
    "regex": ({"structured": pb.StructuredOutput(regex="(")}, "unclosed group"),
    "stop": ({"stop": ["x"] * 17}, "stop"),
}


@pytest.mark.parametrize("name", [*BAD, *VALUES])
def test_a_mistake_is_one_sentence_and_starts_nothing(name: str, client: Client) -> None:
    if name in BAD:
        request, code, words = BAD[name]
    else:
        values, words = VALUES[name]
        request, code = pb.GenerateRequest(prompt=pb.Prompt(text="a")), Code.INVALID_ARGUMENT
        request.sampling.CopyFrom(pb.SamplingParams(**values))
    batch = pb.GenerateBatchRequest(requests=[request])
    refusal(lambda: list(client._stub.Generate(request)), code, words)
    refusal(lambda: client._stub.GenerateBatch(batch), code, words)


def test_bytes_that_are_no_message_and_messages_that_are_too_large(
    serve_grpc: Callable[..., GrpcServer],
) -> None:
    with Client(serve_grpc(max_body_bytes=10_000).address) as client:
        raw = client.channel.unary_unary(f"/{SERVICE}/Tokenize")
        refusal(lambda: raw(b"\xff\xff\xff"), Code.UNKNOWN, "Error parsing message")
        refusal(lambda: client.tokenize("a" * 20_000), Code.RESOURCE_EXHAUSTED, "larger than max")
        refusal(lambda: client.generate_batch(["a"] * 65), Code.INVALID_ARGUMENT, "max_prompts")
        refusal(lambda: client.detokenize([2048]), Code.INVALID_ARGUMENT, "token id 2048")
        assert client.detokenize(client.tokenize("and\0then")) == "and\0then"


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
def test_who_leaves_frees_what_was_held(
    how: str, serve_grpc: Callable[..., GrpcServer], bundled: Bundled
) -> None:
    """The fixture checks that nothing is held; without an abort it would wait for 400 tokens."""
    client = Client(serve_grpc().address)
    options = {"max_tokens": 400, "ignore_eos": True, "n": 2}
    served, engine = bundled[:2]
    gate, began = StepGate(engine._runner, free=20), engine.stats().steps
    with heard_abort(served) as told:
        stream: Any = client.stream(PROMPT, timeout=2.0 if how == "deadline" else None, **options)
        next(stream)
        if how == "deadline":
            refusal(lambda: list(stream), Code.DEADLINE_EXCEEDED, "")
        elif how == "cancel":
            stream.cancel()
        else:
            client.close()
        assert told.wait(SECONDS)
    gate.open()
    wait_for(lambda: not engine.has_work())
    assert engine.stats().steps < began + 30
    client.close()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_request_can_be_aborted_by_its_name(client: Client) -> None:
    stream = client.stream(PROMPT, request_id="mine", max_tokens=400, ignore_eos=True)
    next(stream)
    refusal(lambda: list(client.stream(PROMPT, request_id="mine")), Code.INVALID_ARGUMENT, "in use")
    assert client.abort("mine")
    refusal(lambda: list(stream), Code.ABORTED, "mine was aborted")
    wait_for(lambda: not client.abort("mine"))


def test_a_failed_completion_is_an_internal_error_and_the_next_one_works(
    client: Client, bundled: Bundled, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = bundled[1]._runner

    def fail(*arguments: object) -> None:
        raise ValueError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "step", fail)
        refusal(
            lambda: client.generate(PROMPT, **GREEDY),
            Code.INTERNAL,
            StepFailed.__name__ + "|injected",
        )
        refusal(lambda: list(client.stream(PROMPT, **GREEDY)), Code.INTERNAL, "injected")
    assert client.generate(PROMPT, **GREEDY).completions[0].text


def test_a_full_queue_says_when_to_come_again(loop_thread: LoopThread) -> None:
    with stalled_engine(max_queue=2) as (engine, release):
        front = GrpcServer(loop_thread, engine)
        with Client(front.address) as client:
            futures: list[Any] = []
            for _ in range(12):
                request = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[3])))
                futures.append(
                    client._stub.GenerateBatch.future(pb.GenerateBatchRequest(requests=[request]))
                )
            wait_for(lambda: any(future.done() for future in futures))
            refused = next(future for future in futures if future.done())
            assert refused.code() is Code.RESOURCE_EXHAUSTED and "max_queue" in refused.details()
            assert dict(refused.trailing_metadata())[PUSHBACK] == "1000"
            release()
            for future in futures:
                assert future.code() in (Code.OK, Code.RESOURCE_EXHAUSTED)
        front.close()


def test_only_who_has_a_key_is_answered(
    serve_grpc: Callable[..., GrpcServer], tmp_path: Any
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    address = serve_grpc(api_key_file=keys).address
    for key in (None, "", "First", "first second", "firs"):
        with Client(address, api_key=key) as stranger:
            refusal(stranger.memory, Code.UNAUTHENTICATED, "API key is missing or wrong")
            refusal(lambda c=stranger: list(c.stream("a")), Code.UNAUTHENTICATED, "API key")
            assert check(stranger) == health_pb2.HealthCheckResponse.SERVING
    for key in ("first", "second"):
        with Client(address, api_key=key) as friend:
            assert friend.memory().running == 0


def check(client: Client, service: str = "") -> Any:
    stub = health_pb2_grpc.HealthStub(client.channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service)).status


def test_health_follows_the_engine(loop_thread: LoopThread) -> None:
    status = health_pb2.HealthCheckResponse
    with stalled_engine() as (engine, release):
        front = GrpcServer(loop_thread, engine, stall_seconds=0.2)
        with Client(front.address) as client:
            assert check(client) == check(client, SERVICE) == status.SERVING
            refusal(lambda: check(client, "other"), Code.NOT_FOUND, "")
            stream = client.stream([3, 4], max_tokens=3)
            wait_for(lambda: check(client, SERVICE) == status.NOT_SERVING)
            release()
            assert list(stream)
            wait_for(lambda: check(client, SERVICE) == status.SERVING)
        front.close()


def test_a_drain_refuses_new_calls_and_ends_open_streams(loop_thread: LoopThread) -> None:
    with stalled_engine() as (engine, release):
        front = GrpcServer(loop_thread, engine)
        with Client(front.address) as client, heard_abort(engine) as told:
            stream = client.stream([3, 4], max_tokens=60, ignore_eos=True)
            wait_for(lambda: engine.stats().waiting + engine.stats().running > 0)
            drain = threading.Thread(target=loop_thread.run, args=(engine.drain(0.2),))
            drain.start()
            wait_for(lambda: not engine.accepting)
            error: Any = refusal(lambda: client.generate([3]), Code.UNAVAILABLE, "is shutting down")
            assert dict(error.trailing_metadata())[PUSHBACK] == "5000"
            assert told.wait(SECONDS)
            release()
            refusal(lambda: list(stream), Code.ABORTED, "was aborted")
            drain.join()
        front.close()


def test_a_signal_to_the_process_lets_calls_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP and gRPC in one process, on the toy model; the client is a thread of it."""
    runner = FakeRunner((FULL, STATE), (40, 4), small_config())
    engine, counts = Engine(runner, None), list[int]()

    def call(address: str) -> None:
        with Client(address) as client:
            stream = client.stream([3, 4], max_tokens=40, ignore_eos=True)
            counts.append(len(next(stream).token_ids))
            os.kill(os.getpid(), signal.SIGTERM)
            counts.extend(len(event.token_ids) for event in stream)

    start, threads = GrpcFront.start, list[threading.Thread]()

    async def start_and_call(front: GrpcFront) -> None:
        await start(front)
        threads.append(threading.Thread(target=call, args=(front.url.split("//")[1],)))
        threads[0].start()

    monkeypatch.setattr(GrpcFront, "start", start_and_call)
    config = load_config({"http_port": 0, "grpc_port": 0})
    assert asyncio.run(server.serve(engine, None, config, "toy")) == 0
    threads[0].join(SECONDS)
    assert sum(counts) == 40
    assert_baseline(engine, runner)


def test_a_port_that_is_taken_is_an_error(
    serve_grpc: Callable[..., GrpcServer], bundled: Bundled, loop_thread: LoopThread
) -> None:
    port = int(serve_grpc().address.rsplit(":", 1)[1])
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
        GrpcServer(loop_thread, bundled[0], grpc_port=port)


def test_the_client_needs_no_jax() -> None:
    code = "import sys, serving.client; assert not {'jax', 'hybrid_jax'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
