"""POST /tokenize and /detokenize."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from hybrid_jax.errors import InvalidRequest
from serving.http_api.context import Server
from serving.http_api.schemas import Body, ChatMessage

router = APIRouter()


class TokenizeRequest(Body):
    """A text or a conversation, never both."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class TokenizeResponse(BaseModel):
    """Its tokens."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(Body):
    """Some tokens."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(BaseModel):
    """Their text, special tokens included."""

    prompt: str


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, server: Server) -> TokenizeResponse:
    """Token ids of a text, or of a conversation in the chat template."""
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages")
    if body.prompt is not None:
        ids = await server.engine.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    else:
        _, ids = await server.engine.encode_chat(
            [message.for_template() for message in body.messages or []],
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
        )
    return TokenizeResponse(
        tokens=ids, count=len(ids), max_model_len=server.engine.config.max_model_len
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, server: Server) -> DetokenizeResponse:
    """The text of token ids."""
    server.check_model(body.model)
    vocab_size = server.engine.model_config.vocab_size
    for token in body.tokens:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"token {token} is outside the vocabulary [0, {vocab_size})")
    tokenizer = server.engine.require_tokenizer()
    return DetokenizeResponse(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))
