"""POST /v1/completions."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request

from hybrid_jax.engine.types import TokenEvent, TokenLogprob, Usage
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
    wanted: dict[str, Any] = {"prompt_logprobs": body.logprobs if body.echo else None}
    if body.prompt_only:
        wanted |= {"max_tokens": 1, "ignore_eos": True, "stop": (), "stop_token_ids": ()}
    params = body.sampling_params(logprobs=body.logprobs, **wanted)
    prompts = await _token_ids(server, body)
    form = CompletionFormat(server, body, prompts, params.n)
    requests = await server.requests(form.id, prompts, params, max_tokens=body.max_tokens)
    if body.stream:
        return stream(server.engine, requests, lambda: form, include_usage=body.include_usage)
    outputs = await collect(http, server.engine, requests)
    # The texts of a long prompt's likely tokens take a while.
    return await asyncio.to_thread(form.whole, outputs) if body.echo else form.whole(outputs)


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
        self._prompt_logprobs: dict[int, Sequence[TokenLogprob | None]] = {}  # by prompt
        self._offsets: dict[int, int] = {}  # characters of a choice's tokens so far

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response that is no stream."""
        choices = []
        for i, output in enumerate(outputs):
            if output.prompt_logprobs is not None:
                self._prompt_logprobs[i] = output.prompt_logprobs
            for completion in output.outputs:
                index = i * self._n + completion.index
                choice = self._choice(index, completion.text, completion.token_ids)
                choice["text"] = self._echo(index) + choice["text"]
                choice["logprobs"] = self._logprobs(index, choice["token_ids"], completion.logprobs)
                choice["finish_reason"] = completion.finish_reason
                choice["stop_reason"] = completion.stop_reason
                choices.append(self._shown(choice))
        usage = total_usage(output.usage for output in outputs)
        return self._head | {"choices": choices, "usage": self._usage(usage)}

    def begin(self, index: int) -> dict[str, Any] | None:
        """The prompt, if it is to be echoed; not before its log probabilities, if they are, too."""
        text = self._echo(index)
        if not text or self._body.logprobs is not None:
            return None
        return self._chunk({"index": index, "text": text, "token_ids": []})

    def chunk(self, index: int, event: TokenEvent) -> dict[str, Any]:
        """The text of one event."""
        choice = self._choice(index, event.text, event.new_token_ids)
        if event.prompt_logprobs is not None:
            self._prompt_logprobs[index // self._n] = event.prompt_logprobs
        if event.logprobs is not None:
            if index not in self._offsets:
                choice["text"] = self._echo(index) + choice["text"]
            choice["logprobs"] = self._logprobs(index, choice["token_ids"], event.logprobs)
        return self._chunk(choice, event)

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk without choices."""
        return self._head | {"choices": [], "usage": self._usage(usage)}

    def _choice(self, index: int, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """What was generated, as far as it was asked for."""
        if self._body.prompt_only:
            return {"index": index, "text": "", "token_ids": []}
        return {"index": index, "text": text, "token_ids": list(token_ids)}

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> dict[str, Any] | None:
        """Of the next tokens of a choice, the prompt's first if it is echoed."""
        if logprobs is None:
            return None
        entries: list[TokenLogprob | None] = list(logprobs[: len(token_ids)])
        offset, prompt = self._offsets.get(index), index // self._n
        if offset is None and prompt in self._prompt_logprobs:
            token_ids = [*self._prompts[prompt], *token_ids]
            entries = [*self._prompt_logprobs[prompt], *entries]
        body = completion_logprobs(self._tokenizer, token_ids, entries, offset or 0)
        self._offsets[index] = (offset or 0) + sum(map(len, body["tokens"]))
        return body

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return usage_body(replace(usage, completion_tokens=0) if self._body.prompt_only else usage)

    def _chunk(self, choice: dict[str, Any], event: TokenEvent | None = None) -> dict[str, Any]:
        choice.setdefault("logprobs", None)
        choice["finish_reason"] = event and event.finish_reason
        choice["stop_reason"] = event and event.stop_reason
        return self._head | {"choices": [self._shown(choice)], "usage": None}

    def _shown(self, choice: dict[str, Any]) -> dict[str, Any]:
        if not self._body.return_token_ids:
            del choice["token_ids"]
        return choice

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
