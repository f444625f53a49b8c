"""What a request asks of the sampler, checked once when the request is made."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64
GREEDY_BELOW = 1e-5  # smaller temperatures are greedy, as in vLLM: dividing by them says no more
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 10.0


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

    The order in which the fields act is that of `hybrid_jax.runtime.sampling`. Sequences and
    mappings are normalised: `stop` (a string is one stop string), `stop_token_ids` and
    `logits_processors` to tuples, `logit_bias` to an immutable dict.

    Raises:
        ValueError: a field is outside its range; the message names the value and the remedy.
            `max_tokens=0` is refused, too: a request that generates nothing has no result, so
            ask for one token and ignore it when only the prompt matters.
    """

    n: int = 1  # completions per prompt
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
    logit_bias: Mapping[int, float] = field(default_factory=FrozenBias)
    logits_processors: tuple[str, ...] | list[str] = ()  # names registered with the engine
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._normalise()
        self._check_counts()
        self._check_distribution()
        self._check_penalties()
        self._check_lists()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    def _normalise(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "logits_processors"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ValueError(f"{name} must be a list, got the string {value!r}; wrap it in [ ]")
            object.__setattr__(self, name, _tuple(name, value))
        object.__setattr__(self, "logit_bias", _frozen_bias(self.logit_bias))

    def _check_counts(self) -> None:
        _integer("n", self.n, 1, "ask for at least one completion")
        _integer("max_tokens", self.max_tokens, 1, "use 1 and ignore the token to run a prompt")
        _integer("min_tokens", self.min_tokens, 0, "use 0 for no minimum")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must not exceed max_tokens, got {self.min_tokens} > "
                f"{self.max_tokens}; raise max_tokens or lower min_tokens"
            )
        _integer("top_k", self.top_k, -1, "use 0 or -1 to keep all tokens")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, "use None for no log probabilities")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), "use a 64-bit integer")
            if self.seed >= 2**64:
                raise ValueError(f"seed must fit into 64 bits, got {self.seed}; use a smaller one")

    def _check_distribution(self) -> None:
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE, "use 0 for greedy decoding")
        _number("top_p", self.top_p, 0.0, 1.0, "use 1 to keep all tokens", above=True)
        _number("min_p", self.min_p, 0.0, 1.0, "use 0 to keep all tokens")

    def _check_penalties(self) -> None:
        _number(
            "repetition_penalty",
            self.repetition_penalty,
            0.0,
            MAX_REPETITION_PENALTY,
            "use 1 for no penalty",
            above=True,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -2.0, 2.0, "use 0 for no penalty")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias token", token, 0, "use token ids of the model's vocabulary")
            _number(f"logit_bias of token {token}", bias, -100.0, 100.0, "use -100 to ban a token")

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(
                f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}; "
                "send fewer"
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, got {text!r}; leave it out")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids must have at most {MAX_STOP_TOKEN_IDS} ids, got "
                f"{len(self.stop_token_ids)}; send fewer"
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, "use token ids of the model's vocabulary")
        for name in self.logits_processors:
            if not isinstance(name, str):
                raise ValueError(
                    f"logits_processors must hold names, got {name!r}; register the function with "
                    "the engine and pass its name"
                )


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list, got {value!r}; wrap it in [ ]")
    return tuple(value)


def _frozen_bias(value: Any) -> FrozenBias:
    """A frozen copy of `value`, with the string keys of JSON objects turned into ids."""
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map token ids to biases, got {value!r}; use a dict")
    pairs: dict[int, float] = {}
    for token, bias in value.items():
        try:
            pairs[int(token)] = float(bias)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"logit_bias must map token ids to numbers, got {token!r}: {bias!r}; fix this entry"
            ) from None
    return FrozenBias(pairs)


def _integer(name: str, value: Any, least: int, remedy: str) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be an integer, got {value!r}; {remedy}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}; {remedy}")


def _number(
    name: str, value: Any, least: float, most: float, remedy: str, *, above: bool = False
) -> None:
    """Refuses what is no finite number in [least, most]; with `above`, least itself as well."""
    # hasattr, not isinstance: numpy scalars are numbers, too.
    number = hasattr(value, "__float__") and not isinstance(value, bool)
    numeric = float(value) if number else math.nan
    if not least <= numeric <= most or (above and numeric == least):  # NaN fails, too
        left = "(" if above else "["
        shown = value if number else repr(value)
        raise ValueError(f"{name} must be in {left}{least:g}, {most:g}], got {shown}; {remedy}")
