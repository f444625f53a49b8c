"""From sampled tokens to events: stop conditions, text, and the one final event per request."""

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass

from hybrid_jax.engine.detokenizer import Detokenizer, StopStrings, TextStream
from hybrid_jax.engine.types import (
    FinishReason,
    Request,
    Sequence,
    TokenEvent,
    Tokenizer,
    TokenLogprob,
    Usage,
)
from hybrid_jax.errors import NonFiniteLogits

logger = logging.getLogger(__name__)


@dataclass
class _OpenRequest:
    streams: dict[int, TextStream | None]  # open completions by index; None: no text, so far
    tells_prompt: bool = False  # the next token brings the log probabilities of the prompt
    completion_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class OutputProcessor:
    """Text and bookkeeping of all open requests. Makes every event, and so exactly one final one.

    Appends to `Sequence.token_ids`; releasing what a finished sequence holds is the engine's part.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._open: dict[str, _OpenRequest] = {}

    def open(self, request: Request) -> None:
        """Expects all completions of a request."""
        streams: dict[int, TextStream | None] = dict.fromkeys(range(request.params.num_sequences))
        asks = request.params.prompt_logprobs is not None
        self._open[request.request_id] = _OpenRequest(streams, tells_prompt=asks)

    def is_open(self, request_id: str, index: int | None = None) -> bool:
        """Whether a request, or one completion of it, has not had its last event."""
        state = self._open.get(request_id)
        return state is not None and (index is None or index in state.streams)

    def append(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> TokenEvent:
        """Appends a sampled token; the event says whether the completion ends with it."""
        params = sequence.request.params
        sequence.token_ids.append(token_id)
        if logprob is not None:
            sequence.cumulative_logprob += logprob.logprob
            logprob = logprob if params.logprobs is not None else None
        streams = self._open[sequence.request.request_id].streams
        if sequence.num_output_tokens == 1:  # not before: a tokenizer may raise at any prompt
            streams[sequence.index] = self._stream(sequence.request)
        stream = streams[sequence.index]
        may_stop = sequence.num_output_tokens > params.min_tokens
        text, stop_reason, ends = "", None, False
        if may_stop and token_id in params.stop_token_ids:
            ends, stop_reason = True, token_id
        elif may_stop and token_id in self._eos and not params.ignore_eos:
            ends = True
        complete = False
        if sequence.matcher is not None and not ends:
            sequence.matcher.accept(token_id)
            complete = sequence.matcher.finished
        # The token that ends a completion is no part of its text, unless asked for.
        if stream is not None and (not ends or params.include_stop_str_in_output):
            text, stop_string = stream.push(token_id, may_stop=may_stop)
            if stop_string is not None:
                return self._event(sequence, (token_id,), text, logprob, "stop", stop_string)
        reason: FinishReason | None = "stop" if ends or complete else None
        if reason is None and sequence.num_output_tokens >= sequence.max_tokens:
            reason = "length"
        if reason is not None and stream is not None:
            rest, stop_string = stream.flush(may_stop=may_stop)
            text += rest
            if stop_string is not None:
                reason, stop_reason = "stop", stop_string
        return self._event(sequence, (token_id,), text, logprob, reason, stop_reason)

    def abort(self, sequence: Sequence) -> TokenEvent:
        """Ends a completion that nobody wants any more; shows the text held back so far."""
        stream, text = self._open[sequence.request.request_id].streams[sequence.index], ""
        try:
            text = stream.flush()[0] if stream is not None else ""
        except Exception:  # a tokenizer's; nobody reads on
            logger.exception("the last text of request %s is lost", sequence.request.request_id)
        return self._event(sequence, (), text, None, "abort")

    def fail(self, sequence: Sequence, error: Exception) -> TokenEvent:
        """Ends a completion with an error."""
        return self._event(sequence, (), "", None, "error", error=error)

    def _event(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        text: str,
        logprob: TokenLogprob | None,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None = None,
        *,
        error: Exception | None = None,
    ) -> TokenEvent:
        request = sequence.request
        state = self._open[request.request_id]
        usage, report, prompt, cumulative_logprob = None, None, None, None
        if token_ids and state.tells_prompt:
            prompt = _prompt_logprobs(sequence)
            state.tells_prompt = False
        if finish_reason is not None:
            report = sequence.report if sequence.num_output_tokens else None
            if report is not None and sequence.index == 0:
                state.cached_tokens = report.cached_tokens
            del state.streams[sequence.index]  # a second end would be our bug and raises here
            cumulative_logprob = sequence.cumulative_logprob if request.params.ranked else None
            state.completion_tokens += sequence.num_output_tokens
            state.draft_tokens += sequence.num_draft_tokens
            state.accepted_tokens += sequence.num_accepted_tokens
            if not state.streams:
                del self._open[request.request_id]
                usage = Usage(
                    len(request.prompt_token_ids),
                    state.completion_tokens,
                    state.cached_tokens,
                    state.draft_tokens,
                    state.accepted_tokens,
                )
        return TokenEvent(
            request_id=request.request_id,
            index=sequence.index,
            new_token_ids=token_ids,
            text=text,
            logprobs=None if logprob is None else (logprob,),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            usage=usage,
            error=error,
            cache=report,
            prompt_logprobs=prompt,
            cumulative_logprob=cumulative_logprob,
        )

    def _stream(self, request: Request) -> TextStream | None:
        params = request.params
        if self._tokenizer is None or not params.detokenize:
            return None
        detokenizer = Detokenizer(
            self._tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
        )
        stops = StopStrings(tuple(params.stop), include=params.include_stop_str_in_output)
        return TextStream(detokenizer, stops)


def _prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprob | None, ...] | None:
    """All of them; None if the completion that computes them failed. Raises NonFiniteLogits."""
    known = sequence.prompt_logprobs
    if known is None or len(known) < sequence.num_prompt_tokens:
        return None
    for position, entry in enumerate(known):
        if entry is not None and not math.isfinite(entry.logprob):
            raise NonFiniteLogits(
                f"the logits of the prompt's token {position} are NaN or Inf; check the weights "
                "and dtype, or leave prompt_logprobs out"
            )
    return tuple(known)
