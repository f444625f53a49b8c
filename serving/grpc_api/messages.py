"""Between the protocol's messages and the library's values."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from google.protobuf.json_format import MessageToDict

from hybrid_jax import SamplingParams, StructuredOutput
from hybrid_jax.cache.prefix import CacheReport
from hybrid_jax.engine.types import FinishReason, TokenEvent, TokenLogprob, Usage
from hybrid_jax.errors import InvalidRequest
from hybrid_jax.llm import CompletionOutput, RequestOutput
from serving.grpc_api import inference_pb2 as pb
from serving.sessions import SessionInfo

_FINISH: dict[FinishReason | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """What to ask of the engine; the fields have the same names. Raises InvalidRequest."""
    values: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    if "logit_bias" in values:
        values["logit_bias"] = dict(message.logit_bias)
    try:
        if "structured" in values:
            values["structured"] = _structured(message.structured)
        return SamplingParams(**values)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _structured(message: pb.StructuredOutput) -> StructuredOutput:
    kind = message.WhichOneof("kind")
    if kind is None:
        return StructuredOutput()
    value: Any = list(message.choice.values) if kind == "choice" else getattr(message, kind)
    return StructuredOutput(**{kind: value})


def conversation(chat: pb.Chat) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The messages of a conversation and the further variables of its template."""
    messages = [{"role": each.role, "content": each.content} for each in chat.messages]
    return messages, MessageToDict(chat.template_args)


def event_message(event: TokenEvent) -> pb.GenerateResponse:
    """One piece of a stream."""
    return pb.GenerateResponse(
        request_id=event.request_id,
        text=event.text,
        token_ids=event.new_token_ids,
        usage=_usage(event.usage),
        prompt_logprobs=_logprobs(event.prompt_logprobs or ()),
        **_completion_fields(event),
    )


def result_message(output: RequestOutput) -> pb.GenerateResult:
    """All of a request that has ended."""
    return pb.GenerateResult(
        request_id=output.request_id,
        completions=[
            pb.GenerateResponse(
                request_id=output.request_id,
                text=completion.text,
                token_ids=completion.token_ids,
                **_completion_fields(completion),
            )
            for completion in output.outputs
        ],
        usage=_usage(output.usage),
        prompt_logprobs=_logprobs(output.prompt_logprobs or ()),
    )


def session_message(info: SessionInfo) -> pb.Session:
    """A session; the fields have the same names."""
    return pb.Session(**asdict(info))


def _completion_fields(completion: TokenEvent | CompletionOutput) -> dict[str, Any]:
    """The fields that a piece of a completion and a whole one have in common."""
    reason = completion.stop_reason
    return {
        "index": completion.index,
        "logprobs": _logprobs(completion.logprobs or ()),
        "finish_reason": _FINISH[completion.finish_reason],
        "stop_string": reason if isinstance(reason, str) else None,
        "stop_token_id": reason if isinstance(reason, int) else None,
        "cache": _cache(completion.cache),
    }


def _logprobs(entries: Iterable[TokenLogprob | None]) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=[pb.TopLogprob(token_id=token, logprob=p) for token, p in entry.top.items()],
        )
        for entry in entries
        if entry is not None
    ]


def _cache(report: CacheReport | None) -> pb.CacheReport | None:
    if report is None:
        return None
    return pb.CacheReport(
        cached_tokens=report.cached_tokens, granularity=report.granularity, reason=report.reason
    )


def _usage(usage: Usage | None) -> pb.Usage | None:
    if usage is None:
        return None
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        draft_tokens=usage.draft_tokens,
        accepted_tokens=usage.accepted_tokens,
    )
