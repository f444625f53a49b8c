"""POST /v1/chat/completions."""

import inspect
import time
from typing import Any

from fastapi import APIRouter, Request

from hybrid_jax import SamplingParams
from hybrid_jax.engine.types import TokenEvent, Usage
from hybrid_jax.errors import InvalidRequest
from hybrid_jax.llm import RequestOutput
from serving.context import ServerContext, new_id
from serving.http_api.context import Server
from serving.http_api.generation import STREAMED, collect, stream, total_usage, usage_body
from serving.http_api.logprobs import chat_logprobs
from serving.http_api.schemas import ChatRequest, ChatResponse

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatResponse, responses=STREAMED)
async def create_chat_completion(body: ChatRequest, http: Request, server: Server) -> Any:
    """Answers a conversation, `n` times; with `stream`, as server-sent events."""
    server.check_model(body.model)
    params = _params(server, body)
    _, token_ids = await server.engine.encode_chat(
        [message.for_template() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt,
        tools=None if body.tool_choice == "none" else body.tools,
        **_template_variables(server, body.chat_template_kwargs or {}),
    )
    form = ChatFormat(server, body)
    asked = body.max_completion_tokens or body.max_tokens
    requests = await server.requests(form.id, [token_ids], params, max_tokens=asked)
    if body.stream:
        return stream(server.engine, requests, lambda: form, include_usage=body.include_usage)
    return form.whole(await collect(http, server.engine, requests))


def _template_variables(server: ServerContext, given: dict[str, Any]) -> dict[str, Any]:
    """The client's variables of the template; it may not replace the template or its input."""
    template = server.engine.require_tokenizer().hf.apply_chat_template
    fixed = {"messages", *inspect.signature(template).parameters}
    for name in given.keys() & fixed:
        raise InvalidRequest(f"chat_template_kwargs sets {name}, which is fixed; leave it out")
    return given


def _params(server: ServerContext, body: ChatRequest) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true; set it or leave top_logprobs out")
    most = body.max_completion_tokens or body.max_tokens
    return body.sampling_params(
        max_tokens=server.engine.config.max_model_len if most is None else most,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


class ChatFormat:
    """Writes the answers to one request."""

    def __init__(self, server: ServerContext, body: ChatRequest) -> None:
        self.id = new_id("chatcmpl")
        self._tokenizer = server.engine.tokenizer
        self._head = {"id": self.id, "created": int(time.time()), "model": server.model_name}
        self._body = body

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response that is no stream."""
        choices = []
        for completion in outputs[0].outputs:
            choice: dict[str, Any] = {
                "index": completion.index,
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                "logprobs": None,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            if completion.logprobs is not None:
                choice["logprobs"] = chat_logprobs(self._tokenizer, completion.logprobs)
            if self._body.return_token_ids:
                choice["token_ids"] = completion.token_ids
            choices.append(choice)
        usage = usage_body(total_usage([outputs[0].usage]))
        return self._head | {"object": "chat.completion", "choices": choices, "usage": usage}

    def begin(self, index: int) -> dict[str, Any] | None:
        """The role."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None})

    def chunk(self, index: int, event: TokenEvent) -> dict[str, Any]:
        """The text of one event."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": event.text} if event.text else {},
            "logprobs": event.logprobs and chat_logprobs(self._tokenizer, event.logprobs),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(event.new_token_ids)
        return self._chunk(choice, event)

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk without choices."""
        body = {"choices": [], "usage": usage_body(usage)}
        return self._head | {"object": "chat.completion.chunk"} | body

    def _chunk(self, choice: dict[str, Any], event: TokenEvent | None = None) -> dict[str, Any]:
        choice["finish_reason"] = event and event.finish_reason
        choice["stop_reason"] = event and event.stop_reason
        return self._head | {
            "object": "chat.completion.chunk",
            "choices": [choice],
            "usage": None,
        }
