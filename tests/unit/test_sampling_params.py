"""SamplingParams refuses bad values with one useful sentence and normalises the rest."""

import copy
import itertools
import pickle
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")
HUGE = 10**400  # more than a float holds

FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
BAD: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-0.1, NAN, INF, 101.0, "1", True, None, HUGE, 1j)),
    *(("temperature", value) for value in ([0.5], np.ones(2), {}, print)),
    *(("top_p", value) for value in (0.0, -0.5, 1.01, NAN)),
    *(("min_p", value) for value in (-0.01, 1.01, NAN)),
    *(("top_k", value) for value in (-2, 1.5)),
    *(("repetition_penalty", value) for value in (0.0, 1e-300, -1.0, 10.5, NAN)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, NAN)),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, INF)),
    *(("n", value) for value in (0, -1, 1.0, True, 129, HUGE, None)),
    *(("best_of", value) for value in (0, -1, 1.0, True, 129)),
    *(("max_tokens", value) for value in (0, -1, None, HUGE, np.ones(2, int))),
    *(("min_tokens", value) for value in (-1, 17)),
    *(("seed", value) for value in (2**64, -(2**63) - 1, 0.5, "1", HUGE)),
    *(("logprobs", value) for value in (-1, True, 2**31)),
    *(("prompt_logprobs", value) for value in (-1, False, 2**31)),
    *(("stop", value) for value in ("", ["a", ""], ["a"] * 17, ["a"] * 1000, [1], 5, {"a": 1})),
    *(("stop", value) for value in (b"a", None, itertools.count(), ["a", b"b"])),
    *(("stop_token_ids", value) for value in ([-1], ["1"], "12", 5, [0] * 65, [True], [2**31])),
    *(("logit_bias", value) for value in ({1: 100.5}, {1: NAN}, {-1: 0.0}, {"a": 1.0}, [1])),
    *(("logit_bias", value) for value in ({1.5: 1.0}, {True: 1.0}, {None: 1.0}, {HUGE: 1.0})),
    *(("logit_bias", value) for value in ({1: "2"}, {1: True}, {1: None}, {1: 1, "1": 2}, "1", 5)),
    *(("logits_processors", value) for value in ("name", [print], ["a"] * 65)),
    *((name, value) for name in FLAGS for value in (1, "no", None)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_values_are_refused_in_one_sentence(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(name) and "\n" not in message and len(message) < 200
    assert "got " in message and "; " in message  # the value and the remedy


def test_max_tokens_zero_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="got 0; use 1 and ignore the token"):
        SamplingParams(max_tokens=0)


def test_fewer_cannot_be_generated_than_are_returned() -> None:
    with pytest.raises(ValueError, match="best_of must be at least n, got 2 < 3; raise best_of"):
        SamplingParams(n=3, best_of=2)
    assert [SamplingParams(n=3, best_of=b).num_sequences for b in (None, 3, 5)] == [3, 3, 5]


def test_boundaries_are_accepted() -> None:
    SamplingParams(temperature=0, top_p=1, min_p=1, top_k=-1, presence_penalty=-2, logprobs=0)
    SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=2**64 - 1)
    SamplingParams(stop=["x"] * 16, min_tokens=16, logit_bias={0: -100, 1: 100})


def test_a_number_too_long_to_print_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at most .* got one int; lower it"):
        SamplingParams(max_tokens=10**5000)


def test_scalars_of_numpy_and_jax_become_pythons() -> None:
    params = SamplingParams(
        temperature=jnp.float32(0.5),  # type: ignore[arg-type]
        top_k=np.array(3),  # type: ignore[arg-type]
        seed=np.uint64(2**64 - 1),  # type: ignore[arg-type]
        ignore_eos=np.bool_(True),  # type: ignore[arg-type]
        stop_token_ids=np.arange(2),  # type: ignore[arg-type]
        logit_bias={np.int64(4): np.float32(1.5)},  # type: ignore[dict-item]
    )
    plain = SamplingParams(
        temperature=0.5,
        top_k=3,
        seed=2**64 - 1,
        ignore_eos=True,
        stop_token_ids=(0, 1),
        logit_bias={4: 1.5},
    )
    assert params == plain and repr(params) == repr(plain)


def test_sequences_and_mappings_are_normalised_and_frozen() -> None:
    given = {3: 1, "7": -2.5}
    params = SamplingParams(
        stop="end", stop_token_ids=[4, 5], logits_processors=["a"], logit_bias=given
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (4, 5)
    assert params.logits_processors == ("a",)
    assert params.logit_bias == {3: 1.0, 7: -2.5}
    given[9] = 0
    assert 9 not in params.logit_bias
    with pytest.raises(TypeError, match="cannot be changed"):
        params.logit_bias[3] = 0.0  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_copies_are_equal() -> None:
    params = SamplingParams(logit_bias={3: 1.0}, stop=["a"], seed=1)
    for other in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), replace(params)):
        assert other == params and hash(other) == hash(params)
    assert SamplingParams(**asdict(params)) == params


def test_tiny_temperatures_are_greedy() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy
