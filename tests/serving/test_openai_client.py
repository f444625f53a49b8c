"""OpenAI's own client against the bundled model, sync and async; the engine is the reference."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.engine.types import Request
from hybrid_jax.llm import RequestOutput
from serving.async_engine import AsyncEngine
from tests.helpers.http_server import MODEL, HttpServer, LoopThread
from training.recall import make_prompt

PROMPT = "And it came to pass that"
MESSAGES: Any = [{"role": "user", "content": "Who made the heaven?"}]


@pytest.fixture
def server(serve_bundled: Callable[..., HttpServer]) -> HttpServer:
    return serve_bundled()


@pytest.fixture
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def expect(
    server: HttpServer, loop_thread: LoopThread
) -> Callable[[str | list[int], SamplingParams], RequestOutput]:
    """What the engine says without HTTP."""
    engine: AsyncEngine = server.context.engine
    numbers = iter(range(1000))

    def run(prompt: str | list[int], params: SamplingParams) -> RequestOutput:
        async def work() -> RequestOutput:
            ids = await engine.encode(prompt) if isinstance(prompt, str) else prompt
            request = Request(f"expected-{next(numbers)}", tuple(ids), params)
            return await engine.generate(request).collect()

        return loop_thread.run(work())

    return run


def test_a_completion_is_the_engines(client: openai.OpenAI, expect: Any) -> None:
    got = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3
    )
    want = expect(PROMPT, SamplingParams(temperature=0, max_tokens=12, logprobs=3))
    (choice,) = got.choices
    completion = want.outputs[0]
    assert (choice.text, choice.finish_reason) == (completion.text, "length")
    assert got.usage is not None and choice.logprobs is not None
    assert got.usage.completion_tokens == 12
    assert got.usage.prompt_tokens == len(want.prompt_token_ids)
    assert got.usage.total_tokens == 12 + len(want.prompt_token_ids)
    assert got.usage.prompt_tokens_details is not None
    assert got.usage.prompt_tokens_details.cached_tokens == want.usage.cached_tokens
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert choice.logprobs.token_logprobs == [entry.logprob for entry in completion.logprobs]
    assert [len(top) for top in choice.logprobs.top_logprobs or []] == [3] * 12
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert offsets == [len("".join(tokens[:i])) for i in range(12)]


def test_the_best_of_many_are_the_most_likely(client: openai.OpenAI, expect: Any) -> None:
    want = expect(PROMPT, SamplingParams(n=5, seed=4, max_tokens=6, logprobs=0))
    ranked = sorted(want.outputs, key=lambda c: -sum(entry.logprob for entry in c.logprobs))
    got = client.completions.create(
        model=MODEL, prompt=PROMPT, n=2, best_of=5, seed=4, max_tokens=6
    )
    assert [choice.text for choice in got.choices] == [c.text for c in ranked[:2]]
    assert [choice.index for choice in got.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in got.choices)
    assert got.usage is not None
    assert got.usage.completion_tokens == want.usage.completion_tokens


def test_a_streamed_completion_says_the_same(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "seed": 3, "logprobs": 2}
    whole = client.completions.create(**options)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    *parts, last = chunks
    assert "".join(c.choices[0].text for c in parts) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in parts] == [None] * (len(parts) - 1) + ["length"]
    assert all(c.usage is None for c in parts) and last.choices == [] and last.usage == whole.usage
    pieces = [c.choices[0].logprobs for c in parts]
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [x for piece in pieces for x in getattr(piece, name)]
        assert joined == getattr(whole.choices[0].logprobs, name)


def test_prompts_and_n_make_choices_in_order(client: openai.OpenAI, expect: Any) -> None:
    prompts = [PROMPT, "Then said Moses"]
    options: Any = {"model": MODEL, "prompt": prompts, "n": 2, "max_tokens": 6, "seed": 7}
    whole = client.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for i, prompt in enumerate(prompts):
        want = expect(prompt, SamplingParams(n=2, seed=7, max_tokens=6))
        texts = [c.text for c in want.outputs]
        assert [c.text for c in whole.choices[2 * i : 2 * i + 2]] == texts
    streamed = dict.fromkeys(range(4), "")
    ends = []
    for chunk in client.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert list(streamed.values()) == [c.text for c in whole.choices]
    assert sorted(ends) == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first(
    client: openai.OpenAI, server: HttpServer, stream: bool
) -> None:
    tokenizer = server.context.engine.require_tokenizer()
    ids = tokenizer.encode(PROMPT, add_special_tokens=False)
    for prompt in (PROMPT, ids):
        options: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "temperature": 0}
        plain = client.completions.create(**options).choices[0].text
        got = client.completions.create(**options, echo=True, stream=stream)
        text = "".join(c.choices[0].text for c in got) if stream else got.choices[0].text  # type: ignore[union-attr]
        assert text == PROMPT + plain


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echoed_prompts_have_log_probabilities(
    client: openai.OpenAI, expect: Any, max_tokens: int
) -> None:
    """As evaluation harnesses ask for them: token ids in, several prompts at once."""
    prompts = [[1, 300, 17, 9, 21], [1, 5], [7]]
    options: Any = {"model": MODEL, "prompt": prompts, "n": 2, "temperature": 0, "logprobs": 2}
    got = client.completions.create(**options, max_tokens=max_tokens, echo=True)
    assert got.usage is not None and got.usage.completion_tokens == 6 * max_tokens
    for i, prompt in enumerate(prompts):
        want = expect(
            prompt,
            SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=2),
        )
        completion = want.outputs[0]
        for choice in got.choices[2 * i : 2 * i + 2]:
            logprobs = choice.logprobs
            assert logprobs is not None and choice.finish_reason == "length"
            entries = [*want.prompt_logprobs[1:], *completion.logprobs[:max_tokens]]
            first, *rest = logprobs.token_logprobs or []
            # Other batches round other products: some float32 ulps.
            assert first is None and rest == pytest.approx([e.logprob for e in entries], abs=1e-5)
            nothing, *tops = logprobs.top_logprobs or []
            assert nothing is None
            for top, entry in zip(tops, entries, strict=True):
                assert list(top.values()) == pytest.approx(list(entry.top.values()), abs=1e-5)
            tokens, offsets = logprobs.tokens or [], logprobs.text_offset or []
            assert offsets == [len("".join(tokens[:k])) for k in range(len(prompt) + max_tokens)]
            assert choice.text.endswith(completion.text if max_tokens else "")


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_echoes_with_log_probabilities(client: openai.OpenAI, max_tokens: int) -> None:
    options: Any = {"model": MODEL, "prompt": [PROMPT, "Then"], "n": 2, "seed": 4, "logprobs": 1}
    options |= {"echo": True, "max_tokens": max_tokens}
    whole = client.completions.create(**options)
    chunks = client.completions.create(**options, stream=True)
    texts, found = dict.fromkeys(range(4), ""), {index: [] for index in range(4)}
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            found[choice.index] += choice.logprobs.token_logprobs or []
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.text.startswith(
            options["prompt"][choice.index // 2]
        )
        assert texts[choice.index] == choice.text
        assert found[choice.index] == choice.logprobs.token_logprobs


def test_what_shapes_sampling_reaches_the_engine(client: openai.OpenAI, expect: Any) -> None:
    options: Any = {
        "seed": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"300": 4.0},
        "max_tokens": 10,
    }
    extra: Any = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.2, "ignore_eos": True}
    got = client.completions.create(model=MODEL, prompt=PROMPT, **options, extra_body=extra)
    assert got.choices[0].text == expect(PROMPT, SamplingParams(**options, **extra)).outputs[0].text
    plain = expect(PROMPT, SamplingParams(seed=5, temperature=0.7, max_tokens=10)).outputs[0].text
    assert got.choices[0].text != plain  # otherwise nothing was shown


def test_a_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 30}
    text = client.completions.create(**options).choices[0].text
    stop = text[9:12]
    choice = client.completions.create(**options, stop=["\x00never", stop]).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_a_chat_is_the_engines_answer_to_the_template(
    client: openai.OpenAI, server: HttpServer, expect: Any
) -> None:
    got = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_completion_tokens=10,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    _, ids = server.context.engine.require_tokenizer().encode_chat(MESSAGES)
    want = expect(ids, SamplingParams(temperature=0, max_tokens=10, logprobs=2)).outputs[0]
    (choice,) = got.choices
    assert (choice.message.role, choice.message.content) == ("assistant", want.text)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    entries = choice.logprobs.content
    assert [e.logprob for e in entries] == [e.logprob for e in want.logprobs]
    assert [len(e.top_logprobs) for e in entries] == [2] * len(entries)
    assert entries[0].bytes == list(entries[0].token.encode())
    text_part = {"type": "text", "text": MESSAGES[0]["content"]}
    parts: Any = [{"role": "user", "content": [text_part]}]
    again = client.chat.completions.create(
        model=MODEL,
        messages=parts,
        max_tokens=10,
        temperature=0,
    )
    assert again.choices[0].message.content == want.text


def test_a_streamed_chat_begins_with_the_role(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 9, "seed": 1, "n": 2}
    whole = client.chat.completions.create(**options)
    texts, roles, ends = ["", ""], [], []
    for chunk in client.chat.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        roles += [choice.index] if choice.delta.role else []
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert texts == [c.message.content for c in whole.choices]
    assert (sorted(roles), sorted(ends)) == ([0, 1], [0, 1])


def test_a_chat_without_a_limit_may_fill_the_model(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert got.usage is not None and got.usage.total_tokens == 512
    assert got.choices[0].finish_reason == "length"


def test_tools_reach_the_template(
    client: openai.OpenAI, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = server.context.engine.require_tokenizer()
    template = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{{ messages[0].content }}"
    )
    monkeypatch.setattr(tokenizer.hf, "chat_template", template)
    tool: Any = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    for choice, prefix in (("auto", "look_up;"), ("none", "")):
        got = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            tools=[tool],
            tool_choice=choice,  # type: ignore[arg-type]
            max_tokens=1,
        )
        ids = tokenizer.encode(prefix + MESSAGES[0]["content"], add_special_tokens=False)
        assert got.usage is not None and got.usage.prompt_tokens == len(ids)


SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"enum": ["Ruth", "Moses"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_response_format_shapes_the_answer(client: openai.OpenAI) -> None:
    named: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300, "seed": 2}
    formats: tuple[Any, Any] = (named, {"type": "json_object"})
    for response_format in formats:
        got = client.chat.completions.create(**options, response_format=response_format, n=2)
        for choice in got.choices:
            if choice.finish_reason == "stop":  # else it is the beginning of an object
                value = json.loads(choice.message.content or "")
                assert isinstance(value, dict)
                if response_format is named:
                    assert value["name"] in ("Ruth", "Moses") and type(value["age"]) is int
            assert (choice.message.content or "").startswith("{")
    chosen = {"structured_outputs": {"choice": ["yes", "no"]}}
    for response in (
        client.chat.completions.create(**options, extra_body=chosen).choices[0].message.content,
        client.completions.create(model=MODEL, prompt=PROMPT, extra_body=chosen).choices[0].text,
    ):
        assert response in ("yes", "no")


def test_models_can_be_listed_and_looked_up(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "hybrid-jax"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="lara-kjv"):
        client.completions.create(model="other", prompt=PROMPT)


def test_async_clients_share_batches_and_get_their_own_answers(server: HttpServer) -> None:
    rng = random.Random(11)
    pairs = [make_prompt(rng, num_keys=1, filler_words=20 + i) for i in range(12)]

    async def ask(client: openai.AsyncOpenAI, prompt: str, stream: bool) -> str:
        options: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0}
        if not stream:
            return (await client.completions.create(**options)).choices[0].text
        chunks = await client.completions.create(**options, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def run() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asks = [ask(client, prompt, i % 2 == 0) for i, (prompt, _) in enumerate(pairs)]
            return await asyncio.gather(*asks)

    answers = asyncio.run(run())
    right = [text.startswith(digits) for text, (_, digits) in zip(answers, pairs, strict=True)]
    assert sum(right) >= len(pairs) - 1  # the model's own accuracy on one fact is 100 % (64 of 64)
