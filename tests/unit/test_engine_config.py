"""EngineConfig refuses what no engine can run with, in one sentence, before a model is loaded."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from hybrid_jax.config import EngineConfig
from hybrid_jax.llm import LLM
from tests.helpers.fake_runner import toy_model_config

HUGE = 10**400  # more than a float holds
WHOLE = [field.name for field in fields(EngineConfig) if field.type is int]
FLAGS = [field.name for field in fields(EngineConfig) if field.type is bool]

BAD: list[tuple[str, Any]] = [
    *((name, value) for name in WHOLE for value in ("x", 1.0, None, True, HUGE, [1])),
    *((name, -1) for name in WHOLE if name != "seed"),
    *((name, value) for name in FLAGS for value in ("no", 1, None)),
    *((name, 0) for name in ("page_size", "max_num_batched_tokens")),
    *((name, 1) for name in ("max_model_len", "num_pages")),
    *(("memory_utilization", value) for value in (0.0, 1.5, float("nan"), "half", None, True)),
    *(("kv_dtype", value) for value in ("zzz", "float16", None, ["float32"])),
    *(("state_dtype", value) for value in ("auto", "float16", None)),
    *(("row_buckets", value) for value in ((0, 2), (-2,), (1.5,), ("2",), 2, "2", None, (True,))),
    *(("token_buckets", value) for value in ((0,), (-16, 16), {16: 1}, 16, (2**31,))),
    *(
        ("implementations", value)
        for value in ("reference", [("a", "b")], {"a": 1}, {1: "a"}, None)
    ),
    ("seed", 2**64),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_values_are_refused_in_one_sentence(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        EngineConfig(**{name: value})
    message = str(caught.value)
    assert message.startswith(name) and "\n" not in message and len(message) < 200
    assert "; " in message  # the remedy


def test_every_field_has_a_check_and_defaults_pass() -> None:
    assert WHOLE and FLAGS
    for field in fields(EngineConfig):  # an object passes no check
        with pytest.raises(ValueError, match=field.name) as caught:
            EngineConfig(**{field.name: object()})
        message = str(caught.value)
        if "default" in message:
            assert message.endswith(f"the default is {field.default}")
    assert EngineConfig.of({}) == EngineConfig()
    assert hash(EngineConfig()) == hash(EngineConfig())


def test_a_number_too_long_to_print_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="page_size must be at most .* got one int; lower it"):
        EngineConfig(page_size=10**5000)


def test_scalars_and_vectors_of_numpy_become_pythons() -> None:
    given: Any = {"page_size": np.int64(8), "row_buckets": np.array([2, 4]), "warmup": np.True_}
    config = EngineConfig(**given)
    assert repr(config) == repr(EngineConfig(page_size=8, row_buckets=(2, 4), warmup=True))


def test_an_unknown_option_is_refused_with_what_comes_close() -> None:
    with pytest.raises(ValueError, match="no engine option 'max_num_seq'; did you mean .*_seqs"):
        LLM("no model is looked for", max_num_seq=4)
    with pytest.raises(ValueError, match="'frob'; did you mean max_num_seqs, .*, seed"):
        EngineConfig.of({"frob": 1})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 4097}, "max_model_len 4097 .* use at most 4096"),
        ({"row_buckets": (4, 2, 16)}, r"row_buckets must ascend .* got \(4, 2, 16\); correct"),
        ({"row_buckets": (2, 4)}, "end at max_num_seqs 16 or more"),
        ({"token_buckets": (64, 32, 512)}, r"token_buckets must ascend .* got \(64, 32, 512\)"),
        ({"token_buckets": (64,)}, "end at the token budget 1024 or more"),
    ],
)
def test_what_contradicts_the_model_or_itself_is_refused(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig(**options).resolve(toy_model_config())


def test_no_option_needs_more_positions_than_the_model_has() -> None:
    short = replace(toy_model_config(), max_position=2)
    assert EngineConfig().resolve(short).max_model_len == 2
    assert EngineConfig(max_model_len=2).resolve(short).max_model_len == 2
