"""What a request asks of the sampler, checked once when the request is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hybrid_jax.errors import InvalidRequest
from hybrid_jax.fields import (
    INT32_MAX,
    Check,
    boolean,
    integer,
    normalise,
    number,
    or_none,
    shown,
    tuple_of,
)
from hybrid_jax.structured import StructuredOutput

MAX_COMPLETIONS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64
MAX_LOGITS_PROCESSORS = 64
GREEDY_BELOW = 1e-5  # smaller temperatures are greedy, as in vLLM: dividing by them says no more
MAX_TEMPERATURE = 100.0
REPETITION_PENALTIES = (0.01, 10.0)  # dividing logits by less could overflow


class FrozenBias(dict[int, float]):
    """A dict of token id -> bias that refuses changes, so params can be shared and hashed."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("logit_bias cannot be changed; make new SamplingParams instead")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type["FrozenBias"], tuple[dict[int, float]]]:
        # A dict subclass is otherwise unpickled item by item, through the refused __setitem__.
        return FrozenBias, (dict(self),)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request. Immutable; checked on construction.

    The order in which the fields act is that of `hybrid_jax.runtime.sampling`. Values are
    normalised: scalars of numpy and JAX to Python's; `stop` (a string is one stop string),
    `stop_token_ids` and `logits_processors` to tuples; `logit_bias` to an immutable dict.

    Raises:
        ValueError: a field is of the wrong type or outside its range; the message names the value
            and the remedy. `max_tokens=0` is refused, too: a request that generates nothing has no
            result, so ask for one token and ignore it when only the prompt matters.
    """

    n: int = 1  # completions per prompt, at most MAX_COMPLETIONS
    best_of: int | None = None  # so many are generated, the n most likely returned; None: n
    temperature: float = 1.0  # below GREEDY_BELOW: greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off; prompt and output tokens
    presence_penalty: float = 0.0  # output tokens only
    frequency_penalty: float = 0.0  # output tokens only, per occurrence
    seed: int | None = None  # None: the engine chooses; the low 32 bits count
    max_tokens: int = 16
    min_tokens: int = 0  # no end-of-sequence or stop token before this many output tokens
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: of the sampled token; k: and of the top k
    prompt_logprobs: int | None = None  # likewise for the prompt's tokens, which are all computed
    logit_bias: Mapping[int, float] = field(default_factory=FrozenBias)
    logits_processors: tuple[str, ...] | list[str] = ()  # names registered with the engine
    structured: StructuredOutput | None = None  # what the text must look like; None: anything
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        normalise(self, _CHECKS)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must not exceed max_tokens, got {self.min_tokens} > "
                f"{self.max_tokens}; raise max_tokens or lower min_tokens"
            )

        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(
                f"best_of must be at least n, got {self.best_of} < {self.n}; raise best_of or "
                "lower n"
            )

    @property
    def num_sequences(self) -> int:
        """Completions that are generated."""
        return self.best_of or self.n

    @property
    def ranked(self) -> bool:
        """Whether only the most likely completions are returned."""
        return self.num_sequences > self.n

    @property
    def num_logprobs(self) -> int | None:
        """Log probabilities that a step reports besides the token's own; None: not even that."""
        return 0 if self.ranked and self.logprobs is None else self.logprobs

    def check_streamable(self) -> None:
        """Raises InvalidRequest if nothing can be said before all completions have ended."""
        if self.ranked:
            raise InvalidRequest(
                f"best_of={self.best_of} with n={self.n} cannot be streamed, since which "
                "completions are the best is known at their end; do not stream, or leave it out"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW


def _stop(name: str, value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    return tuple_of(_stop_string, most=MAX_STOP_STRINGS)(name, strings)


def _stop_string(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must hold non-empty strings, got {shown(value)}; leave it out")
    return value


def _processor_name(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"{name} must hold names, got {shown(value)}; register the function with the engine "
            "and pass its name"
        )
    return value


def _structured(name: str, value: Any) -> StructuredOutput:
    if not isinstance(value, StructuredOutput):
        raise ValueError(f"{name} must be a StructuredOutput, got {shown(value)}; make one of it")
    return value


def _logit_bias(name: str, value: Any) -> FrozenBias:
    """A frozen copy of `value`, with the string keys of JSON objects turned into ids."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must map token ids to biases, got {shown(value)}; use a dict")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        token = _token(f"{name} token", token)
        if token in biases:
            raise ValueError(f"{name} must name a token once, got {token} twice; leave one out")
        biases[token] = _bias(f"{name} of token {token}", bias)
    return FrozenBias(biases)


_token = integer(0, INT32_MAX, "use token ids of the model's vocabulary")
_bias = number(-100.0, 100.0, "use -100 to ban a token")
_penalty = number(-2.0, 2.0, "use 0 for no penalty")
_CHECKS: dict[str, Check] = {
    "n": integer(1, MAX_COMPLETIONS, "ask for at least one completion"),
    "best_of": or_none(integer(1, MAX_COMPLETIONS, "use None to return all completions")),
    "temperature": number(0.0, MAX_TEMPERATURE, "use 0 for greedy decoding"),
    "top_k": integer(-1, INT32_MAX, "use 0 or -1 to keep all tokens"),
    "top_p": number(0.0, 1.0, "use 1 to keep all tokens", above=True),
    "min_p": number(0.0, 1.0, "use 0 to keep all tokens"),
    "repetition_penalty": number(*REPETITION_PENALTIES, "use 1 for no penalty"),
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "seed": or_none(integer(-(2**63), 2**64 - 1, "use a 64-bit integer, or None")),
    "max_tokens": integer(1, INT32_MAX, "use 1 and ignore the token to run a prompt"),
    "min_tokens": integer(0, INT32_MAX, "use 0 for no minimum"),
    "stop": _stop,
    "stop_token_ids": tuple_of(_token, most=MAX_STOP_TOKEN_IDS),
    "ignore_eos": boolean,
    "logprobs": or_none(integer(0, INT32_MAX, "use None for no log probabilities")),
    "prompt_logprobs": or_none(integer(0, INT32_MAX, "use None for no log probabilities")),
    "logit_bias": _logit_bias,
    "logits_processors": tuple_of(_processor_name, most=MAX_LOGITS_PROCESSORS),
    "structured": or_none(_structured),
    "detokenize": boolean,
    "skip_special_tokens": boolean,
    "include_stop_str_in_output": boolean,
}
