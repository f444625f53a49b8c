"""Two replicas behind one endpoint: who answers, that he answers right, and what a death costs."""

import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("ray", reason="runs replicas, which needs ray")

from tests.helpers.http_server import MODEL, LoopThread
from tests.helpers.server_process import ServerProcess, server_process
from tests.serving.conftest import ENGINE_OPTIONS, Bundled

pytestmark = pytest.mark.slow
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0.0}
LONG = 400  # tokens; takes seconds
STATES = 64  # prefixes are found at multiples of so many tokens


@pytest.fixture(scope="module")
def process(bundled: Bundled) -> Iterator[ServerProcess]:
    """`hybrid-jax serve --replicas 2`; at the end it has to stop in order."""
    assert bundled.served.accepting  # it has compiled the steps, which the replicas now load
    flags = [
        part
        for name, value in ENGINE_OPTIONS.items()
        for one in (value if isinstance(value, tuple) else (value,))
        for part in (f"--{name.replace('_', '-')}", str(one))
    ]
    flags += ["--dtype", "float32", "--replicas", "2", "--replica-resources", "CPU=0.1"]
    with (
        tempfile.TemporaryDirectory(prefix="ray") as folder,  # a short path, for Unix sockets
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_DEDUP_LOGS", "0")
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # on a busy machine
        patch.setenv("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", str(80 * 2**20))
        with server_process(*flags) as process:
            process.wait_until_listening()
            yield process
            process.terminate()
            assert process.wait() == 0


@pytest.fixture
def client(process: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none") as client:
        yield client


def verse(rng: random.Random) -> str:
    """A beginning that no other prompt has, longer than what decides where it goes."""
    return " ".join(rng.choices(["begat", "saith", "unto", "house", "king", "people"], k=90))


def answered_by(client: openai.OpenAI, prompt: str) -> tuple[str, Any]:
    """Which replica answered, and what."""
    raw = client.completions.with_raw_response.create(prompt=prompt, **GREEDY)
    return raw.headers["x-replica"], raw.parse()


def in_process(bundled: Bundled, loop: LoopThread, prompt: str, max_tokens: int) -> str:
    """What an engine here says, greedily."""
    from hybrid_jax import SamplingParams
    from hybrid_jax.engine.types import Request

    async def work() -> str:
        ids = tuple(await bundled.served.encode(prompt))
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        output = await bundled.served.generate(Request("here", ids, params)).collect()
        return output.outputs[0].text

    return loop.run(work())


def test_prompts_with_a_common_beginning_meet_their_cache(
    client: openai.OpenAI, bundled: Bundled, loop_thread: LoopThread
) -> None:
    rng = random.Random(time.time_ns())
    used: list[str] = []
    while len(used) < 3 or len(set(used)) < 2:
        assert len(used) < 20  # so many prefer the same one with a chance of 1 in 2^19
        beginning = verse(rng)
        first, _ = answered_by(client, f"{beginning} and")
        for ending in (" he said", " the Lord"):
            replica, answer = answered_by(client, beginning + ending)
            assert replica == first
            assert answer.usage.prompt_tokens_details.cached_tokens >= STATES
            expected = in_process(bundled, loop_thread, beginning + ending, GREEDY["max_tokens"])
            assert answer.choices[0].text == expected
        used.append(first)


def test_chats_stream_and_their_turns_stay_at_one_replica(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Who art thou?"}]
    replicas = []
    for _ in range(3):
        create = client.chat.completions.with_raw_response.create
        raw = create(messages=messages, stream=True, **GREEDY)
        replicas.append(raw.headers["x-replica"])
        chunks = list(raw.parse())
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "length" and len(chunks) > 3 and text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    assert len(set(replicas)) == 1


def test_refusals_are_those_of_one_server(process: ServerProcess) -> None:
    url = f"{process.url}/v1/completions"
    wrong = httpx.post(url, json={"prompt": "a", "temperature": -1})
    large = httpx.post(url, content=b"[" + b"1," * 3_000_000)
    broken = httpx.post(url, content=b"{", headers={"Content-Type": "application/json"})
    assert [r.status_code for r in (wrong, large, broken)] == [400, 413, 400]
    for response in (wrong, large, broken):
        assert response.json()["error"]["message"]
        assert len(response.headers.get_list("x-request-id")) == 1
    assert "temperature" in wrong.json()["error"]["message"]
    assert "max_body_bytes" in large.json()["error"]["message"]


def test_who_goes_away_frees_what_he_held(process: ServerProcess) -> None:
    body = {"prompt": "Now", "max_tokens": LONG, "n": 8, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{process.url}/v1/completions", json=body) as response:
        next(response.iter_lines())
        replica = response.headers["x-replica"]
    aborted = 0.0
    while not aborted:  # only a broken server lets this run into the test's time limit
        metrics = httpx.get(f"{process.url}/metrics")
        if metrics.headers["x-replica"] == replica:
            found = re.search(
                r'request_success_total\{finished_reason="abort".*} (.*)', metrics.text
            )
            assert found is not None
            aborted = float(found[1])
    assert aborted == 8


def test_a_death_ends_only_what_ran_there_and_the_other_goes_on(
    process: ServerProcess, client: openai.OpenAI
) -> None:
    rng = random.Random(time.time_ns())
    prompts: dict[str, str] = {}
    while len(prompts) < 2:
        prompt = verse(rng)
        prompts[answered_by(client, prompt)[0]] = prompt
    options: dict[str, Any] = GREEDY | {"max_tokens": LONG, "stream": True}
    extra = {"ignore_eos": True}
    streams = [
        client.completions.create(prompt=prompt, extra_body=extra, **options)
        for prompt in prompts.values()
    ]
    for stream in streams:
        next(stream)
    pids = set(re.findall(r"Replica pid=(\d+)", "".join(process.lines)))
    os.kill(int(pids.pop()), signal.SIGKILL)
    ends = []
    for stream in streams:
        try:
            ends.append([chunk.choices[0].finish_reason for chunk in stream][-1])
        except openai.APIError as error:
            ends.append(error.message)
    (died,) = set(ends) - {"length"}
    assert ends.count("length") == 1 and died and "send the request again" in died
    after = Counter(answered_by(client, prompt)[0] for prompt in prompts.values())
    (survivor,) = set(prompts) & set(after)
    assert after[survivor] >= 1
