"""POST /v1/completions."""

import time
from typing import Any

from fastapi import APIRouter, Request

from hybrid_jax.engine.types import TokenEvent, Usage
from hybrid_jax.errors import InvalidRequest
from hybrid_jax.llm import RequestOutput
from serving.context import ServerContext, new_id
from serving.http_api.context import Server
from serving.http_api.generation import STREAMED, collect, stream, total_usage, usage_body
from serving.http_api.logprobs import completion_logprobs, token_text
from serving.http_api.schemas import CompletionRequest, CompletionResponse

router = APIRouter()


@router.post("/v1/completions", response_model=CompletionResponse, responses=STREAMED)
async def create_completion(body: CompletionRequest, http: Request, server: Server) -> Any:
    """Continues each prompt, `n` times; with `stream`, as server-sent events."""
    server.check_model(body.model)
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("there are no log probabilities of prompts; drop echo or logprobs")
    params = body.sampling_params(logprobs=body.logprobs)
    prompts = await _token_ids(server, body)
    form = CompletionFormat(server, body, prompts, params.n)
    requests = await server.requests(form.id, prompts, params)
    if body.stream:
        return stream(server.engine, requests, lambda: form, include_usage=body.include_usage)
    return form.whole(await collect(http, server.engine, requests))


async def _token_ids(server: ServerContext, body: CompletionRequest) -> list[list[int]]:
    """The token ids of every prompt."""
    given: list[Any]
    if isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int)):
        given = [body.prompt]
    else:
        given = list(body.prompt)
    if not given:
        raise InvalidRequest("there is no prompt; give at least one")
    if len(given) > server.config.max_prompts:
        limit = server.config.max_prompts
        raise InvalidRequest(f"{len(given)} prompts but max_prompts is {limit}; send fewer at once")
    return [
        await server.engine.encode(prompt, add_special_tokens=body.add_special_tokens)
        if isinstance(prompt, str)
        else prompt
        for prompt in given
    ]


class CompletionFormat:
    """Writes the completions of one request. Choice i belongs to prompt i // n."""

    def __init__(
        self, server: ServerContext, body: CompletionRequest, prompts: list[list[int]], n: int
    ) -> None:
        self.id = new_id("cmpl")
        self._tokenizer = server.engine.tokenizer
        self._head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": server.model_name,
        }
        self._n = n
        self._body = body
        self._prompts = prompts
        self._offsets: dict[int, int] = {}  # characters of a choice's tokens so far

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response that is no stream."""
        choices = []
        for i, output in enumerate(outputs):
            for completion in output.outputs:
                index = i * self._n + completion.index
                logprobs = completion.logprobs
                choice: dict[str, Any] = {
                    "index": index,
                    "text": self._echo(index) + completion.text,
                    "logprobs": logprobs and completion_logprobs(self._tokenizer, logprobs, 0),
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                }
                if self._body.return_token_ids:
                    choice["token_ids"] = completion.token_ids
                choices.append(choice)
        usage = total_usage(output.usage for output in outputs)
        return self._head | {"choices": choices, "usage": usage_body(usage)}

    def begin(self, index: int) -> dict[str, Any] | None:
        """The prompt, if it is to be echoed."""
        text = self._echo(index)
        return self._chunk({"index": index, "text": text}) if text else None

    def chunk(self, index: int, event: TokenEvent) -> dict[str, Any]:
        """The text of one event."""
        choice: dict[str, Any] = {"index": index, "text": event.text}
        if event.logprobs:
            offset = self._offsets.get(index, 0)
            choice["logprobs"] = completion_logprobs(self._tokenizer, event.logprobs, offset)
            tokens = choice["logprobs"]["tokens"]
            self._offsets[index] = offset + sum(len(token) for token in tokens)
        if self._body.return_token_ids:
            choice["token_ids"] = list(event.new_token_ids)
        return self._chunk(choice, event)

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk without choices."""
        return self._head | {"choices": [], "usage": usage_body(usage)}

    def _chunk(self, choice: dict[str, Any], event: TokenEvent | None = None) -> dict[str, Any]:
        choice.setdefault("logprobs", None)
        choice["finish_reason"] = event and event.finish_reason
        choice["stop_reason"] = event and event.stop_reason
        return self._head | {"choices": [choice], "usage": None}

    def _echo(self, index: int) -> str:
        prompt = self._body.prompt
        if not self._body.echo:
            return ""
        given = prompt if isinstance(prompt, str) else prompt[index // self._n]
        if isinstance(given, str):
            return given
        ids = self._prompts[index // self._n]
        if self._tokenizer is None:
            return "".join(token_text(None, token) for token in ids)
        return self._tokenizer.decode(ids)
