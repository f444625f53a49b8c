"""Masks of allowed tokens: in the sampler, and made by a grammar for vocabularies of odd sizes."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from hybrid_jax.bundled import bundled_model
from hybrid_jax.errors import GrammarError, InvalidRequest
from hybrid_jax.runtime.batch import TokenMasks
from hybrid_jax.runtime.sampling import SamplingRows, sample
from hybrid_jax.sampling_params import SamplingParams
from hybrid_jax.structured import GrammarCompiler, StructuredOutput, TokenMatcher
from hybrid_jax.tokenizer import load_tokenizer

ROWS, VOCAB = 6, 77  # the last word is not full
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logit_bias={3: 100.0}, repetition_penalty=2.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=5.0, top_k=3),
    SamplingParams(temperature=2.0, top_p=0.5, min_p=0.01),
    SamplingParams(temperature=1.0, logits_processors=("level",)),
]


def level(logits: jax.Array, context: Any) -> jax.Array:
    """A processor that forgets what was barred before it."""
    return jnp.zeros_like(logits)


@functools.partial(jax.jit, static_argnames="group")
def tokens(logits: Any, table: Any, lens: Any, masks: Any, group: int | None = None) -> Any:
    ids = jnp.arange(1, ROWS + 1, dtype=jnp.int32)
    history = jnp.zeros((ROWS + 1, 9), jnp.int32)
    return sample(
        logits, table, ids, lens, history,
        max_logprobs=1, masks=masks, processors=(level,), group=group,
    )  # fmt: skip


def packed(allowed: np.ndarray) -> np.ndarray:
    """bool[S, V] as words, bit by bit."""
    words = np.zeros((len(allowed), -(-VOCAB // 32)), np.uint32)
    for row, token in np.argwhere(allowed):
        words[row, token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


@pytest.mark.parametrize("group", [1, ROWS])
def test_only_allowed_tokens_are_drawn_and_free_rows_draw_as_without_masks(group: int) -> None:
    rng = np.random.default_rng(3)
    table = SamplingRows(ROWS, max_logit_bias=2, processors=("level",))
    for row, params in enumerate(PARAMS, 1):
        table.set_row(row, params, row, 1)
    rows = table.device()
    for lens in range(2, 9):
        logits = rng.normal(size=(ROWS, VOCAB)).astype(np.float32) * 4
        lens_ = np.full(ROWS, lens, np.int32)
        nobody = TokenMasks(np.zeros(ROWS, bool), np.zeros((ROWS, 3), np.int32))  # type: ignore[arg-type]
        without = None if group == ROWS else nobody
        free = np.asarray(tokens(logits, rows, lens_, without, group=group).tokens)
        allowed = rng.random((ROWS, VOCAB)) < 0.1
        allowed[:, 76] = True
        allowed[np.arange(ROWS), free] = False  # what would have been drawn is barred
        constrained = rng.random(ROWS) < 0.5
        masks = TokenMasks(constrained, packed(allowed))  # type: ignore[arg-type]
        got = tokens(logits, rows, lens_, masks, group=group)
        drawn = np.asarray(got.tokens)
        assert np.asarray(got.finite).all()
        assert allowed[np.arange(ROWS), drawn][constrained].all()
        np.testing.assert_array_equal(drawn[~constrained], free[~constrained])
        if constrained[0]:
            assert drawn[0] == np.where(allowed[0], logits[0], -np.inf).argmax()


def test_a_row_that_may_take_nothing_says_so() -> None:
    table = SamplingRows(ROWS, max_logit_bias=2, processors=("level",))
    constrained = np.arange(ROWS) == 2
    masks = TokenMasks(constrained, np.zeros((ROWS, -(-VOCAB // 32)), np.int32))  # type: ignore[arg-type]
    logits = np.zeros((ROWS, VOCAB), np.float32)
    got = tokens(logits, table.device(), np.full(ROWS, 2, np.int32), masks, group=1)
    np.testing.assert_array_equal(np.asarray(got.usable), ~constrained)
    assert np.asarray(got.finite).all()  # the model is not to blame


def bundled_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = load_tokenizer(bundled_model())
    assert tokenizer is not None
    return tokenizer.hf


def allowed_ids(matcher: TokenMatcher) -> set[int]:
    return {
        32 * w + bit
        for w, word in enumerate(matcher.allowed)
        for bit in range(32)
        if word >> bit & 1
    }


@pytest.mark.parametrize("vocab_size", [2048, 2048 + 70, 2000, 1999])
def test_the_allowed_tokens_are_those_that_decode_to_a_beginning(vocab_size: int) -> None:
    """Also where the model has rows that the tokenizer lacks, or lacks some of its tokens."""
    hf = bundled_tokenizer()
    compiler = GrammarCompiler(hf, vocab_size, [2])
    matcher = compiler.matcher(StructuredOutput(regex="(the |l)+or"))
    assert matcher.allowed.shape == (-(-vocab_size // 32),)
    starts = re.compile("((the |l)+(o|or|t|th|the)?|t|th|the)")
    texts = {i: hf.decode([i]) for i in range(6, 2048)}
    expected = {i for i, text in texts.items() if starts.fullmatch(text)}
    expected_here = {i for i in expected if i < vocab_size}
    assert {i for i in allowed_ids(matcher) if i < vocab_size} == expected_here
    matcher.accept(hf.encode("l", add_special_tokens=False)[-1])
    assert 2 not in allowed_ids(matcher)
    for token in hf.encode("or", add_special_tokens=False):
        assert not matcher.finished
        matcher.accept(token)
    assert matcher.finished and allowed_ids(matcher) == {2}


def test_copies_go_their_own_ways_and_a_barred_token_is_an_error() -> None:
    hf = bundled_tokenizer()
    a, b = (hf.encode(text, add_special_tokens=False)[0] for text in "ab")
    first = GrammarCompiler(hf, 2048, [2]).matcher(StructuredOutput(regex="a[bc]+"))
    first.accept(a)
    second = first.copy()
    first.accept(b)
    assert 2 in allowed_ids(first) and 2 not in allowed_ids(second)
    with pytest.raises(GrammarError, match=f"token {a} does not continue"):
        second.accept(a)


@pytest.mark.parametrize("stop_ids", [[], [2, 1, 3]])
def test_all_end_tokens_end_and_a_model_without_one_stops_by_itself(stop_ids: list[int]) -> None:
    hf = bundled_tokenizer()
    compiler = GrammarCompiler(hf, 2048, stop_ids)
    a = hf.encode("a", add_special_tokens=False)[0]
    matcher = compiler.matcher(StructuredOutput(regex="a{1,2}"))
    matcher.accept(a)
    assert allowed_ids(matcher) == {*stop_ids, a} and not matcher.finished
    endless = compiler.matcher(StructuredOutput(regex="a{1,2}"), may_end=False)
    endless.accept(a)
    assert allowed_ids(endless) == {a}
    matcher.accept(a)
    assert allowed_ids(matcher) == set(stop_ids) and matcher.finished


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        def __len__(self) -> int:
            return 5

    compiler = GrammarCompiler(Slow(), 5, [1])
    with pytest.raises(InvalidRequest, match="tokenizer: Only fast tokenizers are supported"):
        compiler.matcher(StructuredOutput(regex="a"))
