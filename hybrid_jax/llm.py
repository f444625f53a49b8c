"""`LLM`: text in, text out, in one process."""

import itertools
import reprlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hybrid_jax.cache.prefix import CacheReport, Prefix
from hybrid_jax.cache.snapshot import Snapshot
from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import (
    EngineStats,
    FinishReason,
    Request,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from hybrid_jax.errors import InvalidRequest, QueueFull, SnapshotError
from hybrid_jax.fields import shown
from hybrid_jax.memory.snapshot import MemorySnapshot
from hybrid_jax.prompts import (
    Messages,
    TokenIds,
    conversation_list,
    params_list,
    prompt_list,
    token_ids,
)
from hybrid_jax.runtime.sampling import LogitsProcessor
from hybrid_jax.sampling_params import SamplingParams
from hybrid_jax.session import Session
from hybrid_jax.structured import GrammarCompiler
from hybrid_jax.tokenizer import HFTokenizer, load_tokenizer

_repr = reprlib.Repr()
_repr.maxstring, _repr.maxother = 80, 500  # characters


class _Brief:
    """Shows, of its fields, those that are set, with long texts and lists cut."""

    def __repr__(self) -> str:
        known = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}  # type: ignore[arg-type]
        cut = (f"{n}={_repr.repr(value)}" for n, value in known.items() if value is not None)
        return f"{type(self).__name__}({', '.join(cut)})"


@dataclass(repr=False)
class CompletionOutput(_Brief):
    """One completion of a prompt. Complete once `finish_reason` is set."""

    index: int
    text: str = ""  # stays empty without a tokenizer, or with detokenize=False
    token_ids: list[int] = field(default_factory=list)
    # One per token, if asked for.
    logprobs: list[TokenLogprob] | None = field(default=None, repr=False)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None  # set when finish_reason is "error"
    cache: CacheReport | None = None  # how much of the prompt was computed before, and why not more
    cumulative_logprob: float | None = None  # of all tokens, if completions were ranked by it


@dataclass(repr=False)
class RequestOutput(_Brief):
    """The completions of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage | None = None  # set once all completions have ended
    # One per prompt token, None for the first; if asked for.
    prompt_logprobs: list[TokenLogprob | None] | None = field(default=None, repr=False)
    n: int = 1  # how many stay then, the most likely first if some go
    # What was computed, for the session that asked.
    kept: Prefix | None = field(default=None, repr=False)

    @classmethod
    def empty(cls, request: Request) -> "RequestOutput":
        """The output of a request that has had no event yet."""
        params, prompt = request.params, list(request.prompt_token_ids)
        completions = [CompletionOutput(index) for index in range(params.num_sequences)]
        return cls(request.request_id, request.prompt, prompt, completions, n=params.n)

    def add(self, event: TokenEvent) -> None:
        """Appends what `event` says to the completion it is about."""
        output = self.outputs[event.index]
        output.text += event.text
        output.token_ids.extend(event.new_token_ids)
        if event.logprobs is not None:
            if output.logprobs is None:
                output.logprobs = []
            output.logprobs.extend(event.logprobs)
        output.finish_reason = event.finish_reason
        output.stop_reason = event.stop_reason
        output.error = event.error
        output.cache = event.cache
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = list(event.prompt_logprobs)
        self.usage = event.usage
        output.cumulative_logprob = event.cumulative_logprob
        self.kept = event.kept or self.kept
        if event.final and len(self.outputs) > self.n:
            self._rank()

    def _rank(self) -> None:
        """Leaves the `n` most likely completions, but above all those that failed."""

        def order(output: CompletionOutput) -> tuple[bool, float]:
            return output.finish_reason in ("stop", "length"), -(output.cumulative_logprob or 0.0)

        self.outputs = sorted(self.outputs, key=order)[: self.n]
        for index, output in enumerate(self.outputs):
            output.index = index


class LLM:
    """A model with its engine and tokenizer. Not thread-safe.

    Closing it, or leaving its `with` block, ends all its requests.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        tokenizer: HFTokenizer | None = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        **engine_options: Any,
    ) -> None:
        """Loads `model`.

        Args:
            model: a Hugging Face directory, an Orbax checkpoint or a GGUF file.
            dtype: of weights and activations; "auto" takes the checkpoint's.
            tokenizer: instead of the model's own. A model without one works with token ids.
            logits_processors: pure JAX functions by name, for `SamplingParams.logits_processors`.
            **engine_options: fields of `EngineConfig`.

        Raises:
            ModelError: it is no model this library can run.
            ValueError: an option is unknown or out of range, or a logits processor cannot run.
        """
        if not isinstance(tokenizer, HFTokenizer | None):
            raise ValueError(
                f"tokenizer must be an HFTokenizer, got {shown(tokenizer)}; make one with "
                "hybrid_jax.tokenizer.load_tokenizer(directory)"
            )
        engine, used = connect(
            model,
            dtype=dtype,
            tokenizer=tokenizer,
            logits_processors=logits_processors,
            engine_options=engine_options,
        )
        self._set_up(engine, used)

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: HFTokenizer | None) -> "LLM":
        """An LLM on an engine that exists; takes ownership of it."""
        llm = cls.__new__(cls)
        llm._set_up(engine, tokenizer)
        return llm

    def _set_up(self, engine: Engine, tokenizer: HFTokenizer | None) -> None:
        self._engine = engine
        self.tokenizer = tokenizer
        self._ids = itertools.count()
        self._mail: dict[str, deque[TokenEvent]] = {}  # events of the requests under way here

    def generate(
        self,
        prompts: str | TokenIds | Sequence[str] | Sequence[TokenIds],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes all prompts, batched; results are in the order of the prompts.

        An interrupt or error ends all of them and leaves nothing allocated.

        Args:
            prompts: one prompt or several, as text or as token ids.
            sampling_params: for all prompts, or one per prompt.
            use_tqdm: whether to show a progress bar on stderr.

        Raises:
            InvalidRequest: a prompt can never be served; none was started.
        """
        return self._run(self._requests(prompt_list(prompts), sampling_params), progress=use_tqdm)

    def stream(
        self, prompt: str | TokenIds, sampling_params: SamplingParams | None = None
    ) -> Iterator[TokenEvent]:
        """Completes one prompt and yields every event; closing the iterator ends the request.

        Raises:
            InvalidRequest: the prompt can never be served; raised here, not by the iterator.
        """
        (request,) = self._requests([prompt], sampling_params)
        request.params.check_streamable()
        return self._events(request)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, given as lists of role and content.

        Raises:
            InvalidRequest: there is no tokenizer or chat template, or as `generate` does.
        """
        conversations = conversation_list(messages)
        tokenizer = self._require_tokenizer("a conversation")
        prompts = [tokenizer.encode_chat(c, **template_args) for c in conversations]
        requests = self._requests([ids for _, ids in prompts], sampling_params)
        requests = [
            Request(r.request_id, r.prompt_token_ids, r.params, text)
            for r, (text, _) in zip(requests, prompts, strict=True)
        ]
        return self._run(requests, progress=use_tqdm)

    def session(self, snapshot: Snapshot | None = None) -> Session:
        """A conversation that computes every token once, from its beginning or a snapshot.

        Raises:
            SnapshotError: it is none, of another model, dtype or page size, or does not fit.
        """
        if snapshot is None:
            return Session(self._engine.kept, self._turn, [])
        if not isinstance(snapshot, Snapshot):
            raise SnapshotError(f"{shown(snapshot)} is no Snapshot; read a file by Snapshot.load")
        prefix = self._engine.kept.restore(snapshot)
        return Session(self._engine.kept, self._turn, list(snapshot.token_ids), prefix)

    def stats(self) -> EngineStats:
        """Sequences, cache use, preemptions, steps and compiles so far."""
        return self._engine.stats()

    def memory(self) -> MemorySnapshot:
        """What every kind of memory holds now, in units and bytes; `to_json` saves it."""
        return self._engine.memory()

    def close(self) -> None:
        """Ends everything; later calls raise EngineDead. Idempotent."""
        self._engine.close()
        self._pump()  # open streams still get their last event

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, requests: list[Request], *, progress: bool) -> list[RequestOutput]:
        outputs = {r.request_id: RequestOutput.empty(r) for r in requests}
        unsent = deque(requests)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        bar = Progress(
            *columns,
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not progress,
            transient=True,
        )
        try:
            with bar:
                task = bar.add_task("prompts", total=len(requests))
                open_ids = set(outputs)
                while open_ids:
                    self._send(unsent)
                    self._pump()
                    for request_id in [i for i in open_ids if self._mail.get(i)]:
                        for event in _take(self._mail[request_id]):
                            outputs[request_id].add(event)
                            if event.final:
                                open_ids.remove(request_id)
                                bar.advance(task)
                bar.live.transient = False  # only a bar that got to its end stays on the screen
        finally:
            self._abandon(outputs)
        return list(outputs.values())

    def _turn(
        self,
        known: TokenIds,
        prompt: str | TokenIds,
        sampling_params: SamplingParams | None,
        prefix: Prefix | None,
    ) -> RequestOutput:
        """The next turn of a session that knows some tokens already."""
        new = self._encode(prompt, add_special_tokens=not known)
        params = sampling_params or SamplingParams()
        request = Request(
            f"llm-{next(self._ids)}", (*known, *new), params, prefix=prefix, keep=True
        )
        self._engine.validate(request)
        return self._run([request], progress=False)[0]

    def _events(self, request: Request) -> Iterator[TokenEvent]:
        unsent = deque([request])
        try:
            while True:
                self._send(unsent)
                if not self._mail.get(request.request_id):
                    self._pump()
                for event in _take(self._mail.get(request.request_id, deque())):
                    yield event
                    if event.final:
                        return
        finally:
            self._abandon([request.request_id])

    def _send(self, unsent: deque[Request]) -> None:
        """Gives the engine as many requests as its queue takes."""
        while unsent:
            request = unsent[0]
            self._mail[request.request_id] = deque()
            try:
                self._engine.add_request(request)
            except QueueFull:
                return
            unsent.popleft()

    def _pump(self) -> None:
        """Runs one step and hands out its events; those of abandoned requests are dropped."""
        for event in self._engine.step():
            mail = self._mail.get(event.request_id)
            if mail is not None:
                mail.append(event)
            elif event.kept is not None:
                self._engine.kept.drop(event.kept)

    def _abandon(self, request_ids: Iterator[str] | Sequence[str] | Mapping[str, Any]) -> None:
        """Ends the given requests, if they have not ended, and frees what they hold."""
        for request_id in request_ids:
            for event in self._mail.pop(request_id, ()):
                if event.kept is not None:
                    self._engine.kept.drop(event.kept)
            self._engine.abort(request_id)
        self._engine.drain_inbox()

    def _requests(
        self,
        prompts: Sequence[str | TokenIds],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """Validated requests; the engine has not seen them."""
        requests = []
        for prompt, chosen in zip(prompts, params_list(params, len(prompts)), strict=True):
            text = prompt if isinstance(prompt, str) else None
            request = Request(f"llm-{next(self._ids)}", self._encode(prompt), chosen, text)
            self._engine.validate(request)
            requests.append(request)
        return requests

    def _encode(
        self, prompt: str | TokenIds, *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return token_ids(prompt)
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one character")
        tokenizer = self._require_tokenizer("a text prompt")
        return tuple(tokenizer.encode(prompt, add_special_tokens=add_special_tokens))

    def _require_tokenizer(self, what: str) -> HFTokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                f"{what} needs a tokenizer and this model has none; pass token ids or tokenizer="
            )
        return self.tokenizer


def _take(mail: deque[TokenEvent]) -> Iterator[TokenEvent]:
    while mail:
        yield mail.popleft()


def connect(
    model: str | Path,
    *,
    dtype: str,
    tokenizer: HFTokenizer | None = None,
    logits_processors: Mapping[str, LogitsProcessor] | None = None,
    engine_options: dict[str, Any],
) -> tuple[Engine, HFTokenizer | None]:
    """Loads a model and builds its runner, engine and tokenizer: the given one or its own."""
    from hybrid_jax.runtime.runner import Runner, open_model

    config = EngineConfig.of(engine_options)
    loaded = open_model(model, dtype=dtype, config=config)
    runner = Runner(loaded, config, processors=logits_processors)
    tokenizer = tokenizer or find_tokenizer(loaded.source)
    grammars = None
    if tokenizer is not None:
        grammars = GrammarCompiler(tokenizer.hf, loaded.config.vocab_size, loaded.stop_ids)
    engine = Engine(runner, tokenizer, stop_ids=loaded.stop_ids, grammars=grammars)
    return engine, tokenizer


def find_tokenizer(source: Path) -> HFTokenizer | None:
    """The tokenizer that came with a model: files in its directory, or a GGUF file's metadata."""
    if source.suffix == ".gguf":
        from hybrid_jax.loading.gguf import GGUFSource

        tokenizer = GGUFSource(source).tokenizer()
        return None if tokenizer is None else HFTokenizer(tokenizer)
    return load_tokenizer(source)
