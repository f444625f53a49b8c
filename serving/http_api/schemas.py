"""The bodies of requests and responses, as OpenAI has them, and a few more fields of vLLM's."""

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hybrid_jax import SamplingParams, StructuredOutput
from hybrid_jax.errors import InvalidRequest

Stop = str | list[str] | None


class Body(BaseModel):
    """What a client sends."""

    # Strict: "1" is no number and 1 is no boolean, as the OpenAPI document says.
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """What a stream says besides its text."""

    include_usage: bool = False
    include_obfuscation: bool | None = None  # OpenAI's; there is none here


class StructuredOutputs(Body):
    """What the text must match; exactly one field."""

    model_config = ConfigDict(populate_by_name=True)

    json_schema: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingFields(Body):
    """The fields that completions and chat share. Null means the default."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Stop = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # accepted, without effect

    # As in vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logits_processors: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = False

    def sampling_params(self, **values: Any) -> SamplingParams:
        """What to ask of the engine; `values` go before the body's fields.

        Raises:
            InvalidRequest: a value is out of range, or fields contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true; set it or leave them out")
        names = {f.name for f in fields(SamplingParams)} & type(self).model_fields.keys()
        given = {n: value for n in names if (value := getattr(self, n)) is not None}
        try:
            if (wanted := self.text_format()) is not None:
                given["structured"] = StructuredOutput(**wanted)
            return SamplingParams(**{**given, **values})
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    def text_format(self) -> dict[str, Any] | None:
        """Arguments of StructuredOutput; None: any text will do."""
        return None if self.structured_outputs is None else self.structured_outputs.model_dump()

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool = False  # with logprobs, the prompt's tokens have theirs as well
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @property
    def prompt_only(self) -> bool:
        """Whether the prompt alone is wanted: the engine's one token at least is thrown away."""
        return self.echo and self.max_tokens == 0


class TextPart(Body):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message. Fields that are not named here reach the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message with its content as one string."""
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            message["content"] = "\n".join(part.text for part in self.content)
        return message


class JSONSchema(Body):
    """A named schema; `strict` makes no difference, it is always enforced."""

    model_config = ConfigDict(extra="ignore")

    name: str
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    def text_format(self) -> dict[str, Any] | None:
        """As `SamplingFields.text_format`. Raises InvalidRequest: no schema, or an unused one."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest("response_format has json_schema if its type is that, else not")
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.schema_}
        return {"json_schema": {"type": "object"}} if self.type == "json_object" else None


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True

    # OpenAI's, accepted without effect.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def text_format(self) -> dict[str, Any] | None:
        """What `response_format` or `structured_outputs` say; not both."""
        wanted = self.response_format and self.response_format.text_format()
        if wanted is not None and self.structured_outputs is not None:
            raise InvalidRequest("response_format and structured_outputs both ask for a format")
        return wanted or super().text_format()


class PromptTokensDetails(BaseModel):
    """Where a prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """How guesses at the completion went; both are 0 without speculation."""

    accepted_prediction_tokens: int  # that are part of it
    rejected_prediction_tokens: int  # the others


class UsageBody(BaseModel):
    """Tokens that a request consumed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class CompletionLogprobs(BaseModel):
    """Log probabilities in the old format; all lists have one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Choice):
    """One completion of one prompt."""

    text: str
    logprobs: CompletionLogprobs | None = None


class TopLogprob(BaseModel):
    """A token that was likely in a place; `bytes` is null if it is no whole character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobBody(TopLogprob):
    """The token that was chosen, and the likely ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities in the chat format."""

    content: list[TokenLogprobBody]
    refusal: None = None


class AssistantMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Choice):
    """One answer."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class _Response(BaseModel):
    id: str
    created: int
    model: str
    usage: UsageBody


class CompletionResponse(_Response):
    """The answer of /v1/completions, if it is no stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ChatResponse(_Response):
    """The answer of /v1/chat/completions, if it is no stream."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorDetail
