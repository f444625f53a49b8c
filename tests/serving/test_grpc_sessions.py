"""Sessions over gRPC: every token computed once, forks apart, snapshots that outlive the server."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.bundled import bundled_model
from hybrid_jax.engine.types import Request
from hybrid_jax.llm import connect
from serving.async_engine import AsyncEngine
from serving.client import AsyncClient, Client
from serving.config import ServerConfig
from serving.sessions import Sessions
from tests.helpers.grpc_server import GrpcServer
from tests.helpers.http_server import LoopThread
from tests.helpers.stalled_engine import stalled_engine
from tests.serving.conftest import ENGINE_OPTIONS, Bundled, assert_idle
from tests.serving.test_grpc import refusal

Code = grpc.StatusCode
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 9, "ignore_eos": True}
PROMPT = "And it came to pass"
SECONDS = 30.0  # only a broken test takes so long


@pytest.fixture
def serve(bundled: Bundled, loop_thread: LoopThread) -> Iterator[Callable[..., Client]]:
    """`serve(**settings)`: a client of the bundled model; once it is closed nothing is held."""
    fronts: list[GrpcServer] = []
    clients: list[Client] = []

    def start(**settings: Any) -> Client:
        front = GrpcServer(loop_thread, bundled.served, **settings)
        fronts.append(front)
        clients.append(Client(front.address))
        return clients[-1]

    yield start
    for client in clients:
        client.close()
    for front in fronts:  # sessions that a test left open go with their server
        front.close()
    assert_idle(bundled.engine)


def say(client: Client, session_id: str, prompt: str | list[int], known: list[int]) -> int:
    """A turn, whose tokens must be those of the whole conversation computed at once.

    Appends them to `known`; returns how many tokens the turn found computed.
    """
    special = not known
    new = client.tokenize(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
    result = client.generate(prompt, session_id=session_id, **GREEDY)
    (completion,) = result.completions
    known += new
    assert result.usage.prompt_tokens == len(known)
    alone = client.generate(known, **GREEDY).completions[0]
    assert completion.token_ids == alone.token_ids and completion.text == alone.text
    known += completion.token_ids
    return result.usage.cached_tokens


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_conversation_computes_every_token_once(serve: Callable[..., Client]) -> None:
    client = serve()
    session_id, known = client.open_session(), list[int]()
    assert say(client, session_id, PROMPT, known) == 0
    for prompt in (" and he said", [300, 17, 5], " unto them"):
        before = len(known)
        assert say(client, session_id, prompt, known) == before - 1  # the last was never fed
    (found,) = client.sessions()
    assert found.session_id == session_id and not found.busy and found.idle_seconds < SECONDS
    assert (found.num_tokens, found.computed_tokens) == (len(known), len(known) - 1)
    client.close_session(session_id)
    assert client.sessions() == []


def test_forks_go_their_own_ways(serve: Callable[..., Client]) -> None:
    client = serve()
    trunk, known = client.open_session(), list[int]()
    say(client, trunk, PROMPT, known)
    branches = [(client.fork(trunk), list(known)) for _ in range(2)]
    branches.append((trunk, known))
    for i, (session_id, tokens) in enumerate(branches * 2):
        before = len(tokens)
        assert say(client, session_id, [50 + i, 7], tokens) == before - 1
    client.close_session(trunk)
    session_id, tokens = branches[0]
    assert say(client, session_id, [9], tokens) > 0
    assert len(client.sessions()) == 2


@pytest.fixture(scope="module")
def second(loop_thread: LoopThread) -> Iterator[AsyncEngine]:
    """Another engine of the same model, as in another process."""
    engine, tokenizer = connect(bundled_model(), dtype="float32", engine_options=ENGINE_OPTIONS)
    served = AsyncEngine(engine, tokenizer)
    served.start()
    yield served
    served.close()


def test_a_snapshot_goes_on_in_another_server(
    serve: Callable[..., Client], second: AsyncEngine, loop_thread: LoopThread, tmp_path: Path
) -> None:
    client = serve(snapshot_dir=tmp_path)
    session_id, known = client.open_session(), list[int]()
    say(client, session_id, PROMPT, known)
    data = client.snapshot(session_id)
    assert client.snapshot(session_id, file="story.1") == b""
    assert [path.name for path in tmp_path.iterdir()] == ["story.1"]
    assert (tmp_path / "story.1").stat().st_size == len(data)
    say(client, session_id, [4, 5], list(known))  # a snapshot is a copy
    front = GrpcServer(loop_thread, second, snapshot_dir=tmp_path)
    with Client(front.address) as other:
        for restored in (other.restore(data), other.restore(file="story.1")):
            tokens = list(known)
            assert say(other, restored, " and it was so", tokens) == len(known) - 1
            assert say(other, restored, [9, 8], tokens) > len(known)
        assert len(other.sessions()) == 2
    front.close()
    assert_idle(second._engine)


def test_what_cannot_be_done_is_said_in_a_sentence(
    serve: Callable[..., Client], tmp_path: Path
) -> None:
    client = serve(max_sessions=2, snapshot_dir=tmp_path, max_snapshot_bytes=3 * 2**20)
    session_id, known = client.open_session(), list[int]()
    refusal(lambda: client.snapshot(session_id), Code.FAILED_PRECONDITION, "computed nothing")
    say(client, session_id, PROMPT, known)
    for call in (client.fork, client.close_session, client.snapshot):
        refusal(lambda call=call: call("session-0"), Code.NOT_FOUND, "no session 'session-0'")
    turn = lambda **options: client.generate([5], session_id=session_id, **options)  # noqa: E731
    refusal(lambda: turn(n=2), Code.INVALID_ARGUMENT, "n=2; fork it")
    refusal(lambda: turn(max_tokens=0), Code.INVALID_ARGUMENT, "max_tokens")
    chat = [{"role": "user", "content": "hello"}]
    refusal(
        lambda: client.generate(chat, session_id=session_id), Code.INVALID_ARGUMENT, "first prompt"
    )
    client.fork(session_id)
    for call in (client.open_session, lambda: client.fork(session_id)):
        refusal(call, Code.RESOURCE_EXHAUSTED, "max_sessions is 2")
    data = client.snapshot(session_id)
    refusal(lambda: client.restore(data), Code.RESOURCE_EXHAUSTED, "max_sessions is 2")
    client.close_session(client.sessions()[1].session_id)
    for name in ("../story", "a/b", "/etc/passwd", ".hidden", "a\0b", "x" * 201):
        words = "no name of a snapshot"
        refusal(lambda n=name: client.snapshot(session_id, file=n), Code.INVALID_ARGUMENT, words)
        refusal(lambda n=name: client.restore(file=n), Code.INVALID_ARGUMENT, words)
    refusal(lambda: client.restore(file="none"), Code.NOT_FOUND, "no snapshot 'none'")
    refusal(lambda: client.restore(data + bytes(4 * 2**20)), Code.RESOURCE_EXHAUSTED, "max_snapsh")
    at = data.index(b'"length":"') + len(b'"length":"')
    damaged = (b"", b"nonsense", data[:-9], data[:at] + b"9" + data[at + 1 :])
    for some in damaged:
        error = refusal(lambda some=some: client.restore(some), Code.FAILED_PRECONDITION, "")
        assert "/" not in str(error.details())  # where the server has its files
    assert list(tmp_path.iterdir()) == []
    assert say(client, session_id, [7], known) > 0  # none of it did any harm
    without = serve()
    other = without.open_session()
    without.generate([5, 6], session_id=other, **GREEDY)
    refusal(lambda: without.snapshot(other, file="a"), Code.FAILED_PRECONDITION, "--snapshot-dir")


def test_a_snapshot_of_another_model_is_refused(
    serve: Callable[..., Client], tmp_path: Path
) -> None:
    client = serve()
    session_id = client.open_session()
    client.generate(PROMPT, session_id=session_id, **GREEDY)
    data = client.snapshot(session_id)
    at = data.index(b'"model":"') + len(b'"model":"')
    other = data[:at] + b"0" * 64 + data[at + 64 :]
    refusal(lambda: client.restore(other), Code.FAILED_PRECONDITION, "made by other weights")


def test_a_turn_that_is_cancelled_leaves_the_session_as_it_was(
    serve: Callable[..., Client], bundled: Bundled
) -> None:
    client = serve()
    session_id, known = client.open_session(), list[int]()
    say(client, session_id, PROMPT, known)
    long = GREEDY | {"max_tokens": 400}
    stream: Any = client.stream([5, 6], session_id=session_id, **long)
    next(stream)
    busy = lambda: client.generate([3], session_id=session_id)  # noqa: E731
    refusal(busy, Code.FAILED_PRECONDITION, "has a turn under way")
    assert client.sessions()[0].busy
    branch, tokens = client.fork(session_id), list(known)
    assert say(client, branch, [44], tokens) == len(known) - 1  # of the turn before
    stream.cancel()
    wait_for(lambda: not client.sessions()[0].busy)
    before = len(known)
    assert say(client, session_id, [8, 9], known) == before - 1


def test_closing_a_session_ends_its_turn(serve: Callable[..., Client]) -> None:
    client = serve()
    session_id = client.open_session()
    stream = client.stream(PROMPT, session_id=session_id, **GREEDY | {"max_tokens": 400})
    next(stream)
    client.close_session(session_id)
    refusal(lambda: list(stream), Code.ABORTED, "was aborted")


def test_closing_a_session_ends_a_turn_that_is_not_accepted_yet(loop_thread: LoopThread) -> None:
    """Its prompt is being encoded; somebody else's request of the same id goes on."""

    async def close_early(engine: AsyncEngine, release: Callable[[], None]) -> None:
        sessions, encoded = Sessions(engine, ServerConfig()), asyncio.Event()
        session_id = (await sessions.open()).session_id

        async def encode(known: tuple[int, ...]) -> tuple[None, list[int]]:
            await encoded.wait()
            return None, [3, 4]

        params = SamplingParams(max_tokens=30, ignore_eos=True)
        generate = sessions.generate(session_id, encode, params, "turn", whole=True)
        turn = asyncio.create_task(generate)
        while not (await sessions.infos())[0].busy:
            await asyncio.sleep(0)
        other = engine.generate(Request("turn", (5, 6), params))
        closed = asyncio.create_task(sessions.close(session_id))
        await asyncio.sleep(0)  # it is between the first step and the second
        release()
        await closed
        assert (await other.collect()).outputs[0].finish_reason == "length"
        encoded.set()
        assert (await (await turn).collect()).outputs[0].finish_reason == "abort"

    with stalled_engine() as (engine, release):
        loop_thread.run(close_early(engine, release))


def test_idle_sessions_are_closed(serve: Callable[..., Client], bundled: Bundled) -> None:
    client = serve(session_idle_seconds=1.0)
    session_id = client.open_session()
    client.generate(PROMPT, session_id=session_id, **GREEDY)
    wait_for(lambda: client.sessions() == [])
    assert_idle(bundled.engine)
    refusal(
        lambda: client.generate([3], session_id=session_id), Code.NOT_FOUND, "session_idle_seconds"
    )


def test_a_turn_that_waits_is_cancelled_before_it_begins(loop_thread: LoopThread) -> None:
    """While the engine is in a step; the session can be used afterwards."""
    with stalled_engine() as (engine, release):
        front = GrpcServer(loop_thread, engine)
        with Client(front.address) as client:
            session_id = client.open_session()
            other = client.stream([3, 4], max_tokens=3)
            wait_for(lambda: engine.stats().waiting + engine.stats().running > 0)
            time.sleep(0.1)  # into the step
            stream: Any = client.stream([5], session_id=session_id, max_tokens=3)
            time.sleep(0.1)
            stream.cancel()
            release()
            list(other)
            wait_for(lambda: not client.sessions()[0].busy)
            result = client.generate([5, 6], session_id=session_id, max_tokens=3, ignore_eos=True)
            assert len(result.completions[0].token_ids) == 3
        front.close()


def test_the_asynchronous_client_has_sessions(
    bundled: Bundled, loop_thread: LoopThread, tmp_path: Path
) -> None:
    front = GrpcServer(loop_thread, bundled.served, snapshot_dir=tmp_path)

    async def talk() -> None:
        async with AsyncClient(front.address) as client:
            first = await client.open_session()
            result = await client.generate(PROMPT, session_id=first, **GREEDY)
            known = [*await client.tokenize(PROMPT), *result.completions[0].token_ids]
            alone = await client.generate([*known, 5], **GREEDY)
            fork = await client.fork(first)
            restored = await client.restore(await client.snapshot(fork))
            assert await client.snapshot(fork, file="f") == b""
            await client.close_session(await client.restore(file="f"))
            stream = client.stream([5], session_id=restored, **GREEDY)
            tokens = [token async for event in stream for token in event.token_ids]
            again = await client.generate([5], session_id=fork, **GREEDY)
            assert tokens == again.completions[0].token_ids == alone.completions[0].token_ids
            assert len(await client.sessions()) == 3

    asyncio.run(talk())
    front.close()
    assert_idle(bundled.engine)
