"""Structured output on the bundled model: texts match, whatever else the requests ask for."""

import copy
import json
import pickle
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest

from hybrid_jax import LLM, SamplingParams, StructuredOutput
from hybrid_jax.bundled import bundled_model
from hybrid_jax.errors import GrammarError, InvalidRequest
from hybrid_jax.llm import CompletionOutput
from hybrid_jax.structured import MAX_GRAMMAR_CHARS, TokenMatcher
from tests.helpers.real_engine import compile_log

PROMPTS = ["In the beginning", "And it came to pass,", "The son of man", "Behold, I", "Woe unto"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Four rows, everything compiled, and pages for about half of what four long texts need."""
    options = {"max_num_seqs": 4, "max_model_len": 256, "page_size": 16, "num_pages": 21}
    buckets = {"row_buckets": (4,), "token_buckets": (32,), "max_num_batched_tokens": 32}
    with LLM(bundled_model(), dtype="float32", warmup=True, **options, **buckets) as llm:
        yield llm


def asking(structured: dict[str, Any], **options: Any) -> SamplingParams:
    values = {"temperature": 1.0, "max_tokens": 200, "seed": 0, **options}
    return SamplingParams(structured=StructuredOutput(**structured), **values)


def complete(llm: LLM, params: list[SamplingParams]) -> list[CompletionOutput]:
    """The first completion of each request; all are given to the engine at once."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
    assert all(output.error is None for output in outputs), outputs
    assert all(group.used == 0 for group in llm.stats().caches)
    return outputs


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose instances are short, of every keyword that llguidance enforces and we use."""
    kinds = ["integer", "boolean", "null", "string", "enum", "pattern", "anyOf"]
    kind = rng.choice(kinds + ["array", "object"] * 4 if depth else kinds)
    low = rng.randint(-50, 50)
    if kind == "integer":
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)}
    if kind == "string":
        return {"type": "string", "minLength": 1, "maxLength": rng.randint(1, 12)}
    if kind == "enum":
        return {"enum": rng.sample(["א", 'a "b"', 3, None, True, "x\ny", 0.5], rng.randint(1, 4))}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-f]{1,6}$", "^(yes|no)!{0,3}$"])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, 0), random_schema(rng, 0)]}
    if kind == "array":
        least = rng.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(rng, depth - 1),
            "minItems": least,
            "maxItems": least + rng.randint(0, 1),
        }
    if kind == "object":
        names = rng.sample(["name", "age", "é", "a b", "list"], rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
    return {"type": kind}


def test_texts_are_valid_under_random_schemas(llm: LLM) -> None:
    """Most run to their end, some after a preemption; what max_tokens cuts counts for nothing."""
    rng = random.Random(7)
    schemas = [random_schema(rng) for _ in range(32)]
    before = llm.stats().preemptions
    with compile_log() as compiles:
        outputs = complete(llm, [asking({"json_schema": s}, seed=i) for i, s in enumerate(schemas)])
    assert compiles == []
    assert llm.stats().preemptions > before
    ended = 0
    for schema, output in zip(schemas, outputs, strict=True):
        if output.finish_reason == "stop":
            ended += 1
            validator = jsonschema_rs.validator_for(schema)
            assert validator.is_valid(json.loads(output.text)), (schema, output.text)
    assert ended >= 28


REGEXES = [
    r"[A-Z][a-z]{2,8}( [a-z]{1,8}){2,5}\.",
    r"\d{4}-\d{2}-\d{2}",
    r"(ab|ba)+c",
    r"[\u0590-\u05ff]{3,5}",
    r"x{0,3}y?z",
]


def test_texts_match_a_regex_from_end_to_end(llm: LLM) -> None:
    params = [
        asking({"regex": regex}, seed=seed, temperature=temperature)
        for regex in REGEXES
        for seed, temperature in ((1, 1.0), (2, 1.5), (3, 0.0))
    ]
    for chosen, output in zip(params, complete(llm, params), strict=True):
        _, regex = chosen.structured.source  # type: ignore[union-attr]
        if output.finish_reason == "stop":
            assert re.fullmatch(regex, output.text), (regex, output.text)
        else:  # "(ab|ba)+c" need not end; then the text is the beginning of a match
            assert re.fullmatch("(ab|ba)*[ab]?", output.text) and "+" in regex


def test_every_choice_is_taken_at_times_and_nothing_else(llm: LLM) -> None:
    """One choice is the beginning of another: there the model decides between it and the end."""
    words = ["and", "and he", 'said "no"\n', "שלום", "/x/"]
    biased = [asking({"choice": words}, seed=i, temperature=100.0) for i in range(60)]
    outputs = complete(llm, biased)
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert {output.text for output in outputs} == set(words)


def test_a_grammar_balances_its_brackets(llm: LLM) -> None:
    lark = 'start: pair\npair: "(" pair? ")" | "[" pair "]"'
    gbnf = 'root ::= "(" root? ")"'
    params = [asking({"grammar": g}, seed=i) for i in range(4) for g in (lark, gbnf)]
    for output in complete(llm, params):
        text = output.text
        while text and output.finish_reason == "stop":
            inner = re.sub(r"\(\)|\[\]", "", text)
            assert inner != text, output.text
            text = inner


def test_rows_do_not_see_their_mates_masks(llm: LLM) -> None:
    """Constrained and free requests of one batch have the tokens that each has alone."""
    params = [
        asking({"regex": "[a-z ]{30}"}),
        SamplingParams(temperature=1.0, seed=4, max_tokens=40, ignore_eos=True),
        asking({"json_schema": {"type": "array", "items": {"type": "integer"}}}, max_tokens=40),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    ]
    together = complete(llm, params)
    for i, chosen in enumerate(params):
        (alone,) = llm.generate(PROMPTS[i], chosen, use_tqdm=False)
        assert alone.outputs[0].token_ids == together[i].token_ids


def test_it_works_with_everything_else_a_request_may_ask_for(llm: LLM) -> None:
    letters = {"regex": "[a-z]{3,60}"}
    stop, many, least, endless = (
        llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
        for params in (
            asking({"regex": "[a-z ]*b[a-z]*"}, stop=["b"]),
            asking(letters, n=3, logprobs=1, repetition_penalty=1.5, top_p=0.95),
            asking(letters, min_tokens=12, logit_bias={2: 50.0}),  # the end, as soon as it may
            asking(letters, ignore_eos=True, logit_bias={2: 100.0}),
        )
    )
    assert stop.outputs[0].stop_reason == "b" and "b" not in stop.outputs[0].text
    assert len({output.text for output in many.outputs}) == 3
    for output in many.outputs:
        assert re.fullmatch("[a-z]{3,60}", output.text)
        assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
        # Log probabilities describe the model, which would rather not write one long word.
        assert any(entry.token_id not in entry.top for entry in output.logprobs)
    (output,) = least.outputs
    assert len(output.token_ids) == 13 and output.token_ids[-1] == 2
    assert len(endless.outputs[0].text) == 60 and 2 not in endless.outputs[0].token_ids


def test_the_end_comes_only_where_the_grammar_accepts_it(llm: LLM) -> None:
    """The bias makes the end token win wherever it is allowed, and a bias cannot allow it."""
    params = asking({"regex": "(ab){4}(cd)*"}, logit_bias={2: 100.0}, temperature=0.0)
    (output,) = complete(llm, [params])
    assert (output.text, output.token_ids[-1], output.finish_reason) == ("abababab", 2, "stop")


def test_min_tokens_cannot_make_a_finished_text_longer(llm: LLM) -> None:
    (output,) = complete(llm, [asking({"regex": "abc"}, min_tokens=50, max_tokens=60)])
    assert (output.text, output.finish_reason) == ("abc", "stop")
    assert 2 not in output.token_ids  # nothing can follow, so no step is spent on the end


def test_an_interrupt_loses_no_place_in_the_grammar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = asking({"json_schema": {"type": "array", "minItems": 3, "maxItems": 9}}, max_tokens=60)
    expected = complete(llm, [params])[0].token_ids
    stream = llm.stream(PROMPTS[0], params)
    tokens = [token for _ in range(8) for token in next(stream).new_token_ids]
    runner = llm._engine._runner

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("x", SamplingParams(), use_tqdm=False)
    tokens += [token for event in stream for token in event.new_token_ids]
    assert tokens == expected


def test_a_grammar_that_gets_stuck_ends_its_own_request_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, free = asking({"regex": "[a-z]{20}"}), SamplingParams(temperature=0.0, max_tokens=9)
    expected = complete(llm, [free, free])[1].token_ids

    def get_stuck(matcher: TokenMatcher, token_id: int) -> None:
        raise GrammarError(f"nothing may follow token {token_id}")

    monkeypatch.setattr(TokenMatcher, "accept", get_stuck)
    ended, other = (o.outputs[0] for o in llm.generate(PROMPTS[:2], [stuck, free], use_tqdm=False))
    assert ended.finish_reason == "error" and isinstance(ended.error, GrammarError)
    assert other.token_ids == expected
    assert all(group.used == 0 for group in llm.stats().caches)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"json_schema": {"type": "nonsense"}}, "json_schema .*nonsense"),
    "not enforced": ({"json_schema": {"not": {"type": "string"}}}, 'json_schema .*"not"'),
    "impossible": ({"json_schema": {"enum": []}}, "json_schema .*Unsatisfiable"),
    "dangling reference": ({"json_schema": {"$ref": "#/$defs/x"}}, "json_schema .*does not exist"),
    "never ends": ({"json_schema": {"$ref": "#"}}, "json_schema cannot be used"),
    "fetches": ({"json_schema": {"$ref": "http://127.0.0.1/x"}}, "json_schema .*not present"),
    "pattern": ({"json_schema": {"type": "string", "pattern": "("}}, "unclosed group"),
    "deep": ({"json_schema": '{"items":' * 300 + "{}" + "}" * 300}, "recursion limit"),
    "open group": ({"regex": "a("}, "regex .*unclosed group"),
    "look-around": ({"regex": "(?=a)b"}, "regex .*look-around"),
    "nothing": ({"regex": r"[^\s\S]"}, "regex cannot be used"),
    "empty": ({"regex": ""}, "regex matches no text but the empty one"),
    "empty choice": ({"choice": [""]}, "choice matches no text but the empty one"),
    "unknown rule": ({"grammar": "start: other"}, "grammar .*unknown name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_matched_is_refused_at_once(name: str, llm: LLM) -> None:
    structured, words = REFUSED[name]
    steps = llm.stats().steps
    with pytest.raises(InvalidRequest, match=words) as error:
        llm.generate("x", asking(structured), use_tqdm=False)
    assert "\n" not in str(error.value)
    assert llm.stats().steps == steps


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "exactly one of .*, got none"),
    "two": ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
    "not JSON": ({"json_schema": '{"type":'}, "json_schema is not JSON"),
    "NaN": ({"json_schema": {"minimum": float("nan")}}, "json_schema is not JSON"),
    "a list": ({"json_schema": "[1]"}, r"must be a JSON object, got \[1\]"),
    "bare choice": ({"choice": "yes"}, "choice must be a list"),
    "no choice": ({"choice": []}, "at least one string"),
    "number": ({"choice": ["a", 3]}, "choice must hold strings, got 3"),
    "regex of bytes": ({"regex": b"a"}, "regex must be a string"),
    "long": ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "65537 characters, more than 65536"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_is_no_value(name: str) -> None:
    fields, words = MALFORMED[name]
    with pytest.raises(ValueError, match=words):
        StructuredOutput(**fields)


def test_an_unknown_field_is_told_the_known_ones() -> None:
    with pytest.raises(TypeError, match="no 'choices'; it takes json_schema, regex, choice or gr"):
        StructuredOutput(choices=["a"])  # type: ignore[call-arg]
    given = StructuredOutput(choice=["a"])
    assert copy.deepcopy(given) == pickle.loads(pickle.dumps(given)) == replace(given)
