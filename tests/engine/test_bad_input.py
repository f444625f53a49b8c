"""What cannot be served is refused in one sentence, and a real engine is as good as before."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from hybrid_jax.errors import InvalidRequest
from hybrid_jax.llm import LLM
from hybrid_jax.sampling_params import SamplingParams
from tests.helpers.engine_checks import greedy
from tests.helpers.real_engine import MAX_LEN, Rig, random_prompt
from tests.helpers.text import byte_tokenizer

GOOD = list(random_prompt(9, 0))

PROMPTS: dict[str, tuple[Any, Any, str]] = {
    "longer than the model": (
        [5] * MAX_LEN,
        None,
        f"has {MAX_LEN} tokens but max_model_len is {MAX_LEN}, .*; shorten it or raise",
    ),
    "empty text": ("", None, "the prompt is empty; give at least one"),
    "no tokens": ([], None, "the prompt is empty; give at least one"),
    "token of another model": ([5, 128], None, r"token id 128 is outside .*\[0, 128\); encode"),
    "negative token": ([5, -3], None, "token id -3 is outside"),
    "biased token": (GOOD, SamplingParams(logit_bias={500: 1.0}), "logit_bias names token 500"),
    "too many biases": (
        GOOD,
        SamplingParams(logit_bias=dict.fromkeys(range(3), 1.0)),
        "3 entries but max_logit_bias is 2; send fewer",
    ),
    "log probabilities": (GOOD, SamplingParams(logprobs=3), "max_logprobs is 2; ask for fewer"),
    "unknown processor": (GOOD, SamplingParams(logits_processors=("x",)), "'x' is not registered"),
}

PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "negative temperature": ({"temperature": -0.1}, "temperature .* got -0.1; use 0"),
    "NaN temperature": ({"temperature": math.nan}, "temperature .* got nan; use 0"),
    "infinite temperature": ({"temperature": math.inf}, "temperature .* got inf; use 0"),
    "no tokens": ({"max_tokens": 0}, "max_tokens .* got 0; use 1"),
    "many stop strings": ({"stop": ["x"] * 1000}, "at most 16 items, got 1000; send fewer"),
    "empty stop string": ({"stop": ""}, "non-empty strings, got ''; leave it out"),
    "top_p": ({"top_p": 0.0}, "top_p .* got 0.0; use 1"),
}


@pytest.fixture(scope="module")
def llm(rig: Callable[[str], Rig]) -> LLM:
    return LLM.from_engine(rig("lara_mini").engine(), byte_tokenizer())


@pytest.mark.parametrize("name", PROMPTS)
def test_a_bad_request_starts_nothing_and_harms_nobody(
    name: str, llm: LLM, rig: Callable[[str], Rig]
) -> None:
    """Refused while another request is in mid-decode."""
    prompt, params, words = PROMPTS[name]
    rig_, engine = rig("lara_mini"), llm._engine
    stream = llm.stream(GOOD, greedy(8))
    tokens = list(next(stream).new_token_ids)
    before = engine.stats()
    for prompts in ([prompt], [GOOD, prompt]):  # alone, and after a good one of the same call
        with pytest.raises(InvalidRequest, match=words) as caught:
            llm.generate(prompts, params, use_tqdm=False)
        assert "\n" not in str(caught.value)
    assert engine.stats() == before
    engine.check_integrity()
    tokens += [token for event in stream for token in event.new_token_ids]
    assert tokens == rig_.oracle(tuple(GOOD), 8)
    rig_.assert_clean(engine)


@pytest.mark.parametrize("name", PARAMETERS)
def test_bad_parameters_are_refused_when_they_are_made(name: str) -> None:
    options, words = PARAMETERS[name]
    with pytest.raises(ValueError, match=words) as caught:
        SamplingParams(**options)
    assert "\n" not in str(caught.value)
