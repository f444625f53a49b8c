"""Which of several replicas a request should go to: where others that begin alike have been."""

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

PREFIX_CHARS = 256  # of a prompt
PREFIX_TOKENS = 64  # of a prompt of token ids


def routing_key(body: bytes) -> str:
    """What the requests have in common that one replica should answer; empty: nothing.

    That is `prompt_cache_key` if the client gives it. Otherwise, of a chat the messages up to the
    first of the user, so that all turns of a conversation have the same key; of a prompt its first
    256 characters or 64 token ids, and of several prompts those of the first.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # the replica says what is wrong with it
        return ""
    if not isinstance(fields, dict):
        return ""
    if key := fields.get("prompt_cache_key"):
        return str(key)
    if isinstance(messages := fields.get("messages"), list):
        return json.dumps(_opening(messages))
    prompt = fields.get("prompt", "")
    while isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:PREFIX_CHARS]
    return json.dumps(prompt[:PREFIX_TOKENS]) if isinstance(prompt, list) else ""


def _opening(messages: list[Any]) -> list[Any]:
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    return messages[: roles.index("user") + 1] if "user" in roles else messages


def preference(key: str, queues: Mapping[str, int], lead: int) -> list[str]:
    """Replicas in the order in which they should get a request with `key`.

    Rendezvous hashing: every pair of key and replica has a random weight, so nobody needs to
    remember where a key went, all routers agree, and a replica that comes or goes moves only its
    own keys. Replicas whose queue is more than `lead` longer than the shortest come last.

    Args:
        queues: requests at each replica, by its id.
    """
    shortest = min(queues.values(), default=0)

    def place(replica: str) -> tuple[bool, bytes]:
        weight = blake2b(f"{replica} {key}".encode("utf-8", "surrogatepass")).digest()
        return queues[replica] - shortest > lead, weight

    return sorted(queues, key=place)
