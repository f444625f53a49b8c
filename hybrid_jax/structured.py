"""Structured output: what the text of a completion must look like, and which tokens may come next.

llguidance does the parsing. It needs no torch, takes JSON schemas, regular expressions and
context-free grammars, computes a mask in well under a millisecond without preparing the schema,
and refuses a schema keyword that it cannot enforce instead of ignoring it.
"""

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hybrid_jax.errors import GrammarError, InvalidRequest
from hybrid_jax.fields import reason, shown, tuple_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_CHARS = 2**16
# Small models love to indent for ever; a schema's own "x-guidance" may say otherwise.
_JSON_DEFAULTS: Any = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class StructuredOutput:
    """What the text of a completion must match, from its first character to its last.

    Exactly one field is set. A completion ends as soon as nothing can follow, whatever
    `min_tokens` says, and where it may end the model's end-of-sequence token ends it. One that
    `max_tokens` or a stop string ends is the beginning of a match.

    Raises:
        ValueError: no field or several are set, or one is not of its type.
        TypeError: there is no such field.
    """

    json_schema: str | Mapping[str, Any] | bool | None = None  # normalised to JSON text
    regex: str | None = None  # of the whole text; Rust's regex syntax, no look-around
    choice: Sequence[str] | None = None  # one of these strings; normalised to a tuple
    grammar: str | None = None  # context-free, in Lark or GBNF notation

    def __new__(cls, *values: Any, **named: Any) -> "StructuredOutput":
        """Says which fields there are, where Python would say only that one does not exist."""
        del values
        for name in named.keys() - cls.__dataclass_fields__.keys():
            raise TypeError(
                f"structured output has no {name!r}; it takes json_schema, regex, choice or grammar"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                "structured output takes exactly one of json_schema, regex, choice and grammar, "
                f"got {' and '.join(given) or 'none'}"
            )
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _json_text(self.json_schema))
        if self.choice is not None:
            choices = tuple_of(_text, most=MAX_GRAMMAR_CHARS)("choice", self.choice)
            if not choices:
                raise ValueError("choice must hold at least one string; leave it out instead")
            object.__setattr__(self, "choice", choices)
        name, text = self.source
        if not isinstance(text, str):
            raise ValueError(f"{name} must be a string, got {shown(text)}; write it as text")
        if len(text) > MAX_GRAMMAR_CHARS:
            raise ValueError(
                f"{name} has {len(text)} characters, more than {MAX_GRAMMAR_CHARS}; simplify it"
            )

    @property
    def source(self) -> tuple[str, str]:
        """The name of the field that is set and its text; choices as a JSON list."""
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        return next((name, value) for name, value in vars(self).items() if value is not None)


class TokenMatcher:
    """How far one completion has come in its grammar."""

    allowed: IntArray  # i32[ceil(V / 32)]: bit v % 32 of word v // 32 says whether token v may come
    finished: bool  # nothing but the end may follow

    def __init__(self, matcher: "LLMatcher", end: IntArray, *, may_end: bool) -> None:
        """Owns `matcher`.

        Args:
            matcher: in its grammar's initial state.
            end: i32[ceil(V / 32)], the bits of the tokens that end a completion.
            may_end: whether `allowed` has them where the grammar is satisfied.

        Raises:
            GrammarError: as `accept` does.
        """
        self._matcher = matcher
        self._end = end
        self._may_end = may_end
        self._look()

    def copy(self) -> "TokenMatcher":
        """An independent matcher in the same state."""
        twin = object.__new__(TokenMatcher)
        twin.__dict__.update(self.__dict__, _matcher=self._matcher.deep_copy())
        return twin

    def accept(self, token_id: int) -> None:
        """Advances by an output token.

        Raises:
            GrammarError: the token is not allowed, no token is allowed after it, or finding the
                allowed ones exceeds llguidance's limits.
        """
        if not self._matcher.consume_token(token_id):
            raise GrammarError(f"token {token_id} does not continue what the request asked for")
        self._look()

    def _look(self) -> None:
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(self._end)]
        if self._matcher.is_error():
            raise GrammarError(
                f"what may come next cannot be computed: {_reason(self._matcher.get_error())}"
            )
        text = words & ~self._end
        self.finished = not text.any()
        if self.finished and not self._matcher.is_accepting():
            raise GrammarError(
                "no token of the vocabulary continues what the request asked for; relax it"
            )
        self.allowed = words if self._may_end else text


class GrammarCompiler:
    """Makes matchers for one model. Its methods may be called from any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Collection[int]) -> None:
        """The first matcher takes up to seconds, by size of the vocabulary; nothing is done here.

        Args:
            tokenizer: a fast tokenizer of the transformers library.
            vocab_size: V of the model. Ids that the tokenizer does not have are never allowed.
            stop_ids: the tokens that end a completion.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = frozenset(stop_ids)
        # A schema is used again and again, and the completions of a request share it.
        self._initial = functools.lru_cache(maxsize=64)(self._compile)

    def matcher(self, structured: StructuredOutput, *, may_end: bool = True) -> TokenMatcher:
        """A matcher of an empty completion.

        Args:
            structured: what the completion must match.
            may_end: whether end tokens are allowed where the grammar is satisfied; without them a
                completion goes on until nothing can follow.

        Raises:
            InvalidRequest: it is malformed, unsupported or impossible, llguidance is not
                installed, or the tokenizer is not a fast one.
        """
        return self._initial(structured, may_end and bool(self._stop_ids)).copy()

    def _compile(self, structured: StructuredOutput, may_end: bool) -> TokenMatcher:
        vocabulary, end = self._vocabulary
        name, text = structured.source
        from llguidance import LLMatcher, grammar_from

        try:
            if name == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(text, defaults=_JSON_DEFAULTS)
            else:
                grammar = grammar_from(name, text)  # type: ignore[arg-type]
            matcher = LLMatcher(vocabulary, grammar, log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            initial = TokenMatcher(matcher, end, may_end=may_end)
        except (ValueError, GrammarError) as error:
            raise InvalidRequest(f"{name} cannot be used: {_reason(str(error))}") from error
        if initial.finished:
            raise InvalidRequest(f"{name} matches no text but the empty one; ask for some")
        return initial

    @functools.cached_property
    def _vocabulary(self) -> tuple["LLTokenizer", IntArray]:
        """The vocabulary as llguidance wants it, and the bits of the tokens that end."""
        try:
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError:  # an extra: said to whoever asks for structured output
            raise InvalidRequest(
                "structured output needs llguidance; install hybrid-jax[structured]"
            ) from None
        known = len(self._tokenizer)
        # llguidance wants an end token; without one the tokenizer's last token plays the part.
        ends = [i for i in self._stop_ids if i < known] or [known - 1]
        try:
            vocabulary = from_tokenizer(
                self._tokenizer, n_vocab=max(self._vocab_size, known), eos_token=ends
            )
        except ValueError as error:
            raise InvalidRequest(
                f"structured output cannot use this model's tokenizer: {_reason(str(error))}"
            ) from error
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[[i for i in ends if i < len(bits)]] = 1
        return vocabulary, np.packbits(bits, bitorder="little").view(np.int32)


def _json_text(schema: Any) -> str:
    """The schema as JSON text. Raises ValueError unless it is an object, true or false."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema is not JSON: {reason(error)}; correct it") from None
    if not isinstance(value, Mapping | bool):
        raise ValueError(f"json_schema must be a JSON object, got {shown(value)}")
    return text


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must hold strings, got {shown(value)}; put it into quotes")
    return value


def _reason(message: str) -> str:
    """The part of one of llguidance's messages, which may draw pictures, that says what is wrong"""
    lines = message.strip().splitlines() or ["no reason given"]
    return next((line[7:] for line in lines if line.startswith("error: ")), lines[0])
