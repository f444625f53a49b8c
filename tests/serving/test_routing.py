"""Keys of requests, and where they lead."""

import json
import random
import time
from collections import Counter
from typing import Any

import pytest

from serving.routing import PREFIX_CHARS, PREFIX_TOKENS, preference, routing_key


def test_turns_of_a_conversation_have_one_key_and_conversations_their_own() -> None:
    def key(*messages: tuple[str, str], **more: Any) -> str:
        body = {"messages": [{"role": r, "content": c} for r, c in messages], **more}
        return routing_key(json.dumps(body).encode())

    system, question = ("system", "Be brief."), ("user", "Who made the heaven?")
    first = key(system, question)
    assert first and key(system, question, ("assistant", "God."), ("user", "When?")) == first
    assert key(system, ("user", "Who?")) != first
    assert key(system, question, prompt_cache_key="mine") == key(prompt_cache_key="mine") == "mine"


def test_prompts_with_the_same_beginning_have_one_key() -> None:
    def key(prompt: Any) -> str:
        return routing_key(json.dumps({"prompt": prompt}).encode())

    text, ids = "x" * PREFIX_CHARS, list(range(PREFIX_TOKENS))
    assert key(text + "a") == key(text + "b") == key([text + "c", "other"])
    assert key("a" + text) != key("b" + text)
    assert key([*ids, 1]) == key([*ids, 2]) == key([[*ids, 3], [4]]) != key([1, *ids])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"[" * 100_000, b'{"prompt": 3}', b"\xff"]
)
def test_what_is_no_request_has_no_key(body: bytes) -> None:
    assert routing_key(body) == ""


def test_keys_spread_evenly_and_stay_when_a_replica_goes() -> None:
    rng = random.Random(time.time_ns())
    replicas = {f"replica{rng.random()}": 0 for _ in range(5)}
    keys = [f"key{rng.random()}" for _ in range(2000)]
    homes = {key: preference(key, replicas, 0)[0] for key in keys}
    # 400 each are expected, with a standard deviation of 18: six of them are 108.
    assert all(290 < count < 510 for count in Counter(homes.values()).values())
    gone = next(iter(replicas))
    left = {name: 0 for name in replicas if name != gone}
    moved = [key for key in keys if preference(key, left, 0)[0] != homes[key]]
    assert moved == [key for key in keys if homes[key] == gone]


def test_a_replica_that_is_too_far_ahead_comes_last() -> None:
    queues = {"a": 0, "b": 0, "c": 0}
    first, second, third = preference("key", queues, 4)
    assert preference("key", queues | {first: 4}, 4)[0] == first
    assert preference("key", queues | {first: 5}, 4) == [second, third, first]
    assert preference("key", dict.fromkeys(queues, 100), 4)[0] == first
