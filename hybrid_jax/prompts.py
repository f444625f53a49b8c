"""What `LLM.generate` and `LLM.chat` accept, as lists: prompts, conversations and parameters."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from hybrid_jax.errors import InvalidRequest
from hybrid_jax.fields import plain, shown
from hybrid_jax.sampling_params import SamplingParams

TokenIds = list[int]
Messages = Sequence[Mapping[str, Any]]


def prompt_list(prompts: Any) -> list[str | TokenIds]:
    """The prompts as a list; a string or a list of integers is one prompt.

    Raises:
        InvalidRequest: it is neither a prompt nor several.
    """
    if isinstance(prompts, str):
        return [prompts]
    given = _listed("prompts must be a string, a list of token ids, or a list of these", prompts)
    return [given] if given and isinstance(plain(given[0]), int | float) else given


def token_ids(prompt: Any) -> tuple[int, ...]:
    """A prompt's token ids.

    Raises:
        InvalidRequest: it is no list of integers.
    """
    ids = [plain(token) for token in _listed("a prompt must be a string or token ids", prompt)]
    for i, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool):
            raise InvalidRequest(
                f"token {i} of the prompt must be an integer, got {shown(token)}; give one string "
                "or a list of integers"
            )
    return tuple(ids)


def params_list(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts.

    Raises:
        InvalidRequest: the number is wrong, or it is something else.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    given = _listed("sampling_params must be SamplingParams or a list of them", params)
    for i, item in enumerate(given):
        if not isinstance(item, SamplingParams):
            raise InvalidRequest(
                f"sampling_params[{i}] must be SamplingParams, got {shown(item)}; "
                "use SamplingParams(temperature=...)"
            )
    if len(given) != count:
        raise InvalidRequest(
            f"{len(given)} sampling params for {count} prompts; give one, or one each"
        )
    return given


def conversation_list(messages: Any) -> list[Messages]:
    """The conversations as a list; a list of messages is one conversation.

    Raises:
        InvalidRequest: it is neither a conversation nor several.
    """
    words = "messages must be a list of {'role': ..., 'content': ...}, or a list of such lists"
    given = _listed(words, messages)
    conversations = [given] if not given or isinstance(given[0], Mapping) else given
    return [_listed(words, conversation) for conversation in conversations]


def _listed(words: str, value: Any) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value  # arrays
    if isinstance(value, str | bytes | bytearray | Mapping | Set) or not isinstance(
        value, Iterable
    ):
        raise InvalidRequest(f"{words}, got {shown(value)}; put it into that form")
    return list(value)
