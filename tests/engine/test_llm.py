"""`LLM` on an engine with a toy runner: prompts in, outputs in order, nothing left behind."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_jax.bundled import bundled_model
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.errors import EngineDead, InvalidRequest, ModelError
from hybrid_jax.llm import LLM
from hybrid_jax.sampling_params import SamplingParams
from hybrid_jax.structured import StructuredOutput
from hybrid_jax.tokenizer import HFTokenizer, load_tokenizer
from tests.helpers import tiny
from tests.helpers.engine_checks import (
    assert_baseline,
    expected_tokens,
    greedy,
    prompt_of,
    small_config,
)
from tests.helpers.fake_runner import FULL, STATE, FakeRunner, window

SPECS = (FULL, window(6), STATE)
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}a"


def ascii_tokenizer(template: str | None = TEMPLATE) -> HFTokenizer:
    """97 tokens: one per printable character, token 1 is the end of sequence."""
    vocab = {chr(32 + i): i + 2 for i in range(95)} | {"<unk>": 0, "<eos>": 1}
    rust = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    rust.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<eos>", unk_token="<unk>")
    hf.chat_template = template
    return HFTokenizer(hf)


def make(tokenizer: HFTokenizer | None = None, **options: Any) -> tuple[LLM, Engine, FakeRunner]:
    runner = FakeRunner(SPECS, (40, 30, 4), small_config(**options))
    engine = Engine(runner, tokenizer)
    return LLM.from_engine(engine, tokenizer), engine, runner


def oracle(token_ids: list[int], params: SamplingParams) -> list[int]:
    return expected_tokens(Request("", tuple(token_ids), params), SPECS)


def test_an_output_is_shown_in_a_few_lines() -> None:
    """Whatever it holds; with what one looks for first."""
    llm, _, _ = make(ascii_tokenizer(), max_model_len=256, max_logprobs=5)
    params = greedy(60, n=3, logprobs=5, prompt_logprobs=5)
    (output,) = llm.generate("to be or not " * 5, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 60
    shown = repr(output)
    assert len(shown) < 2000 and "\n" not in shown
    for words in ("RequestOutput(request_id='llm-0'", "prompt='to be or", "completion_tokens=180"):
        assert words in shown
    completion = repr(output.outputs[1])
    assert completion.startswith("CompletionOutput(index=1, text=") and len(completion) < 500
    assert "finish_reason='length'" in completion and completion in shown


def test_outputs_come_in_the_order_of_the_prompts() -> None:
    llm, engine, runner = make()
    prompts = [list(prompt_of(3 + 7 * i % 20, i)) for i in range(8)]
    params = [greedy(1 + 5 * i % 11) for i in range(8)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, prompt, chosen in zip(outputs, prompts, params, strict=True):
        assert output.prompt is None and output.prompt_token_ids == prompt
        (completion,) = output.outputs
        assert completion.token_ids == oracle(prompt, chosen)
        assert (completion.finish_reason, completion.text) == ("length", "")
    assert_baseline(engine, runner)


class Varied(FakeRunner):
    """Log probabilities differ from token to token."""

    def _run(self, step: Any) -> None:
        super()._run(step)
        step.results["chosen"] = -(step.results["tokens"] % 11 + 1) / np.float32(8)


def test_of_many_completions_the_most_likely_are_returned() -> None:
    """They are those that `n` would give, by the sum of their log probabilities."""
    engine = Engine(runner := Varied(SPECS, (40, 30, 4), small_config()), None)
    llm = LLM.from_engine(engine, None)
    options: Any = {"seed": 5, "max_tokens": 9}
    prompts = [list(prompt_of(9, i)) for i in range(4)]
    every = llm.generate(prompts, SamplingParams(n=5, logprobs=0, **options), use_tqdm=False)
    best = llm.generate(prompts, SamplingParams(n=2, best_of=5, **options), use_tqdm=False)
    for many, few in zip(every, best, strict=True):
        sums = [sum(entry.logprob for entry in c.logprobs or ()) for c in many.outputs]
        assert all(c.cumulative_logprob is None for c in many.outputs)
        ranked = sorted(range(5), key=lambda i: -sums[i])[:2]
        assert len(set(sums)) > 2
        assert [c.token_ids for c in few.outputs] == [many.outputs[i].token_ids for i in ranked]
        assert [c.cumulative_logprob for c in few.outputs] == [sums[i] for i in ranked]
        assert [(c.index, c.logprobs) for c in few.outputs] == [(0, None), (1, None)]
        assert few.usage is not None and many.usage is not None
        assert few.usage.completion_tokens == many.usage.completion_tokens
    with pytest.raises(InvalidRequest, match="best_of=5 with n=2 cannot be streamed"):
        llm.stream(prompts[0], SamplingParams(n=2, best_of=5))
    assert_baseline(engine, runner)


def test_a_failed_completion_is_not_ranked_away() -> None:
    engine = Engine(runner := Varied(SPECS, (40, 30, 4), small_config()), None)
    runner.poisoned_uids.add(3)
    llm = LLM.from_engine(engine, None)
    (output,) = llm.generate([[3, 4, 5]], SamplingParams(best_of=4, seed=1), use_tqdm=False)
    assert [c.finish_reason for c in output.outputs] == ["error"]
    assert_baseline(engine, runner)


def test_one_prompt_may_be_given_bare_and_many_completions_are_grouped() -> None:
    llm, engine, runner = make(ascii_tokenizer())
    params = SamplingParams(n=2, seed=5, max_tokens=7, ignore_eos=True, logprobs=2)
    for prompt, text in (("hello", "hello"), ([3, 4, 5], None)):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.prompt == text
        assert [c.index for c in output.outputs] == [0, 1]
        for completion in output.outputs:
            assert len(completion.token_ids) == len(completion.logprobs or []) == 7
    assert llm.generate([], params) == []
    assert_baseline(engine, runner)


def test_text_is_the_text_of_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = ascii_tokenizer()
    llm, engine, runner = make(tokenizer)
    (output,) = llm.generate(["to be"], greedy(20))
    assert output.prompt_token_ids == tokenizer.encode("to be")
    completion = output.outputs[0]
    assert completion.token_ids == oracle(output.prompt_token_ids, greedy(20))
    assert completion.text == tokenizer.decode(completion.token_ids)
    captured = capsys.readouterr()
    assert "1/1" in captured.err and captured.out == ""
    assert_baseline(engine, runner)


def test_a_stop_string_ends_the_text_before_it() -> None:
    tokenizer = ascii_tokenizer()
    llm, engine, runner = make(tokenizer)
    full = llm.generate("to be", greedy(20), use_tqdm=False)[0].outputs[0].text
    stop = full[6:9]
    cut = llm.generate("to be", greedy(20, stop=stop), use_tqdm=False)[0].outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == full[: full.index(stop)]
    kept = greedy(20, stop=stop, include_stop_str_in_output=True)
    assert llm.generate("to be", kept, use_tqdm=False)[0].outputs[0].text == cut.text + stop
    assert_baseline(engine, runner)


def test_a_stream_yields_what_generate_returns() -> None:
    llm, engine, runner = make(ascii_tokenizer())
    (output,) = llm.generate("to be", greedy(9), use_tqdm=False)
    events = list(llm.stream("to be", greedy(9)))
    assert [t for e in events for t in e.new_token_ids] == output.outputs[0].token_ids
    assert "".join(e.text for e in events) == output.outputs[0].text
    assert [e.final for e in events] == [False] * 8 + [True]
    assert_baseline(engine, runner)


def test_streams_and_generate_may_interleave() -> None:
    llm, engine, runner = make()
    prompts = [list(prompt_of(5 + i, i)) for i in range(3)]
    streams = [llm.stream(prompt, greedy(9)) for prompt in prompts]
    got: list[list[int]] = [[], [], []]
    for _ in range(4):
        for tokens, stream in zip(got, streams, strict=True):
            tokens.extend(next(stream).new_token_ids)
    (between,) = llm.generate([[7, 8]], greedy(5), use_tqdm=False)
    for tokens, stream in zip(got, streams, strict=True):
        tokens.extend(t for event in stream for t in event.new_token_ids)
    assert got == [oracle(prompt, greedy(9)) for prompt in prompts]
    assert between.outputs[0].token_ids == oracle([7, 8], greedy(5))
    assert_baseline(engine, runner)


def test_closing_a_stream_frees_everything() -> None:
    llm, engine, runner = make()
    unstarted = llm.stream([3, 4], greedy(9))
    stream = llm.stream([3, 4, 5], greedy(30))
    next(stream)
    assert engine.stats().running == 1
    stream.close()  # type: ignore[attr-defined]
    unstarted.close()  # type: ignore[attr-defined]
    assert_baseline(engine, runner)
    assert llm.generate([[3, 4]], greedy(5), use_tqdm=False)


@pytest.mark.parametrize("where", ["launch_error", "read_error"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_frees_everything_and_the_next_call_works(
    where: str, error: type[BaseException]
) -> None:
    llm, engine, runner = make()
    prompts = [list(prompt_of(9 + i, i)) for i in range(6)]
    stream = llm.stream(prompts[0], greedy(12))
    tokens = list(next(stream).new_token_ids)
    setattr(runner, where, error())
    with pytest.raises(error):
        llm.generate(prompts[1:], greedy(9), use_tqdm=False)
    assert engine.stats().running + engine.stats().waiting == 1  # the stream's
    tokens += [t for event in stream for t in event.new_token_ids]
    assert tokens == oracle(prompts[0], greedy(12))
    outputs = llm.generate(prompts, greedy(9), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [oracle(p, greedy(9)) for p in prompts]
    assert_baseline(engine, runner)


def test_more_prompts_than_the_queue_takes_are_fed_bit_by_bit() -> None:
    llm, engine, runner = make(max_queue=2)
    prompts = [list(prompt_of(4, i)) for i in range(15)]
    outputs = llm.generate(prompts, greedy(3), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [oracle(p, greedy(3)) for p in prompts]
    assert_baseline(engine, runner)


def test_an_error_of_one_prompt_is_in_its_output() -> None:
    llm, engine, runner = make()
    runner.poisoned_uids.add(2)
    good, bad = llm.generate([[3, 4], [5, 6]], greedy(5), use_tqdm=False)
    assert good.outputs[0].token_ids == oracle([3, 4], greedy(5))
    assert bad.outputs[0].finish_reason == "error" and "NaN" in str(bad.outputs[0].error)
    assert_baseline(engine, runner)


def test_chat_renders_the_template_and_answers() -> None:
    tokenizer = ascii_tokenizer()
    llm, engine, runner = make(tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    (single,) = llm.chat(messages, greedy(5), use_tqdm=False)
    assert single.prompt == "uhi.a"
    assert single.prompt_token_ids == tokenizer.encode("uhi.a")
    both = llm.chat([messages, messages * 2], greedy(5), use_tqdm=False)
    assert [o.prompt for o in both] == ["uhi.a", "uhi.uhi.a"]
    assert both[0].outputs[0].token_ids == single.outputs[0].token_ids
    assert both[0].outputs[0].cache.cached_tokens == 4  # a page of four
    assert_baseline(engine, runner)


BAD: dict[str, tuple[Any, Any, str]] = {
    "empty text": ("", None, "prompt is empty"),
    "empty ids": ([[]], None, "prompt is empty"),
    "large id": ([[3], [4, 97]], None, "token id 97"),
    "negative id": ([-1], None, "token id -1"),
    "too long": ([3] * 64, None, "max_model_len is 64"),
    "not ids": ([[3, "x"]], None, "token 1 of the prompt must be an integer, got 'x'; give"),
    "half a token": ([3, 4.0], None, "token 1 .* got 4.0"),
    "a bool": ([True, 3], None, "token 0 .* got True"),
    "an array of floats": (np.ones(3), None, "token 0 .* got 1.0"),
    "a scalar array": (np.array(5), None, "prompts must be a string, .* got 5"),
    "a number": (5, None, "prompts must be a string, .* got 5"),
    "nothing": (None, None, "prompts must be a string, .* got None"),
    "bytes": (b"hello", None, "prompts must be a string, .* got b'hello'"),
    "a dict": ({"prompt": "x"}, None, "prompts must be a string"),
    "a set": ({3, 4}, None, "prompts must be a string"),
    "text and number": (["hello", 5], None, "a prompt must be a string or token ids, got 5"),
    "nested": ([[[3]]], None, r"token 0 of the prompt must be an integer, got \[3\]"),
    "huge id": ([10**5000], None, "token id one int is outside"),
    "params is a dict": ([3], {"n": 1}, "sampling_params must be SamplingParams or a list"),
    "params is a number": ([3], 5, "sampling_params must be SamplingParams .* got 5"),
    "params is text": ([3], "greedy", "sampling_params must be SamplingParams .* got 'greedy'"),
    "no params in a list": ([[3], [4]], [SamplingParams(), None], r"params\[1\] must .* got None"),
    "params": ([[3], [4]], [SamplingParams()], "1 sampling params for 2 prompts"),
    "logprobs": ([3], SamplingParams(logprobs=99), "max_logprobs"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_prompt_starts_nothing(name: str) -> None:
    prompts, params, words = BAD[name]
    llm, engine, runner = make(ascii_tokenizer())
    with pytest.raises(InvalidRequest, match=words) as caught:
        llm.generate(prompts, params)
    assert "\n" not in str(caught.value)
    if name in ("large id", "not ids", "too long"):
        with pytest.raises(InvalidRequest, match=words):
            llm.stream(prompts[-1] if isinstance(prompts[0], list) else prompts)
    assert engine.stats().steps == 0
    assert_baseline(engine, runner)


def test_arrays_and_generators_are_prompts() -> None:
    llm, _, _ = make()
    expected = [oracle([3, 4], greedy(5)), oracle([5, 6], greedy(5))]
    for prompts in (np.array([[3, 4], [5, 6]]), [np.array([3, 4]), (5, 6)], iter([[3, 4], [5, 6]])):
        outputs = llm.generate(prompts, [greedy(5), greedy(5)], use_tqdm=False)  # type: ignore[arg-type]
        assert [o.outputs[0].token_ids for o in outputs] == expected
    (output,) = llm.generate(jnp.array([3, 4]), greedy(5), use_tqdm=False)  # type: ignore[arg-type]
    assert output.prompt_token_ids == [3, 4] and output.outputs[0].token_ids == expected[0]


MESSAGES: dict[str, tuple[Any, str]] = {
    "a message": ({"role": "user", "content": "hi"}, "messages must be a list of .* got {'role'"),
    "text": ("hello", "messages must be a list of .* got 'hello'"),
    "nothing": (None, "messages must be a list of .* got None"),
    "empty": ([], "conversation is empty"),
    "an empty one of two": ([[{"role": "user", "content": "hi"}], []], "conversation is empty"),
    "texts": (["hello"], "messages must be a list of .* got 'hello'"),
    "no role": ([{}], "message 0 must have a role, got None; use 'user'"),
    "no content": ([{"role": "user"}], "content of message 0 must be text, got None"),
    "a number": ([{"role": "user", "content": 5}], "content of message 0 must be text, got 5"),
    "second": ([{"role": "user", "content": "hi"}, "x"], "message 1 must have role and content"),
    "role": ([{"role": 1, "content": "hi"}], "message 0 must have a role, got 1"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_bad_conversation_starts_nothing(name: str) -> None:
    messages, words = MESSAGES[name]
    llm, engine, runner = make(ascii_tokenizer())
    with pytest.raises(InvalidRequest, match=words) as caught:
        llm.chat(messages)
    assert "\n" not in str(caught.value)
    assert engine.stats().steps == 0
    assert_baseline(engine, runner)


@pytest.mark.parametrize(
    ("template", "args", "words"),
    [
        ("{{ raise_exception('two\nlines') }}", {}, r"\(two lines\); change them or the template"),
        ("{{ messages[0].content + 1 }}", {}, "refuses these messages"),
        ("{{ messages[0]['name'].first }}", {}, "no attribute 'name'"),
        ("{% for %}", {}, "refuses these messages"),
        ("{{ tools | length }}", {"tools": 5}, "refuses these messages"),
        ("a", {"tokenize": True}, "multiple values for keyword argument 'tokenize'"),
        ("", {"chat_template": "{% if %}"}, "no chat template"),
        ("{% if false %}a{% endif %}", {}, "made '' of these messages"),
    ],
)
def test_what_a_template_refuses_is_one_sentence(template: str, args: Any, words: str) -> None:
    llm, engine, runner = make(ascii_tokenizer(template))
    with pytest.raises(InvalidRequest, match=words) as caught:
        llm.chat([{"role": "user", "content": "hi"}], **args)
    assert "\n" not in str(caught.value)
    assert_baseline(engine, runner)


def test_text_without_a_tokenizer_is_refused_and_ids_work() -> None:
    llm, engine, runner = make()
    for call in (
        lambda: llm.generate("hello"),
        lambda: llm.stream("hello"),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
    ):
        with pytest.raises(InvalidRequest, match="needs a tokenizer and this model has none"):
            call()
    with pytest.raises(InvalidRequest, match="stop strings"):
        llm.generate([3, 4], greedy(5, stop="x"))
    assert llm.generate([3, 4], greedy(5), use_tqdm=False)[0].outputs[0].text == ""
    assert_baseline(engine, runner)


def test_chat_without_a_template_or_messages_is_refused() -> None:
    llm, _, _ = make(ascii_tokenizer(template=None))
    with pytest.raises(InvalidRequest, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(InvalidRequest, match="conversation is empty"):
        llm.chat([])
    strict, _, _ = make(ascii_tokenizer(template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        strict.chat([{"role": "user", "content": "hi"}])


def test_a_closed_llm_says_so() -> None:
    llm, engine, runner = make()
    with llm:
        stream = llm.stream([3, 4], greedy(20))
        next(stream)
    assert [event.finish_reason for event in stream] == ["abort"]
    assert_baseline(engine, runner)
    with pytest.raises(EngineDead, match="closed"):
        llm.generate([3, 4], greedy(5), use_tqdm=False)


def test_no_progress_bar_is_left_behind_by_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _, _ = make()
    llm.close()
    with pytest.raises(EngineDead):
        llm.generate([3, 4], greedy(5))
    assert capsys.readouterr().err.strip() == ""
    llm, _, runner = make()
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("TERM", "xterm")
    runner.launch_error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([3, 4], greedy(5))
    shown = capsys.readouterr().err
    assert "0/1" in shown and shown.endswith("\r\x1b[1A\x1b[2K")  # one line up, and erased


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer must be an HFTokenizer, got 'gpt2'; make one"):
        LLM("no model is looked for", tokenizer="gpt2")  # type: ignore[arg-type]


def test_a_given_tokenizer_serves_texts_and_grammars(tmp_path: Any) -> None:
    """Of a model that has none of its own."""
    directory = tiny.write_checkpoint("qwen3", tmp_path, seed=0)
    tokenizer = load_tokenizer(bundled_model())
    with LLM(directory, tokenizer=tokenizer, max_num_seqs=1, max_model_len=64) as llm:
        engine = llm._engine
        assert llm.tokenizer is engine._outputs._tokenizer is tokenizer
        form = StructuredOutput(choice=["yes", "no"])
        engine.validate(Request("r", (40, 41), SamplingParams(structured=form, stop=["."])))


def test_a_tokenizer_does_not_depend_on_config_json(tmp_path: Any) -> None:
    """transformers would hold every field of it against the model's class."""
    ascii_tokenizer().hf.save_pretrained(tmp_path)
    for text in ('{"model_type": "qwen3", "hidden_size": "x", "layer_types": 3}', "[]", "{"):
        (tmp_path / "config.json").write_text(text)
        loaded = load_tokenizer(tmp_path)
        assert loaded is not None and loaded.decode(loaded.encode("to be")) == "to be"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer of .* cannot be read .*; copy its files") as e:
        load_tokenizer(tmp_path)
    assert "\n" not in str(e.value)


def test_a_saved_tokenizer_loads_and_a_directory_without_one_is_none(tmp_path: Any) -> None:
    assert load_tokenizer(tmp_path) is None
    ascii_tokenizer().hf.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None and loaded.decode(loaded.encode("to be")) == "to be"
    assert loaded.eos_token_id == 1
