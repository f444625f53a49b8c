"""Engines that are broken on purpose: each check must see the fault it is there for."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hybrid_jax.cache.prefix import Match, Prefix, PrefixTree
from hybrid_jax.checking import check
from hybrid_jax.checking.behaviour import (
    check_isolation,
    check_long_prompt,
    check_repetition,
    check_seed,
    check_turns,
    repeated_share,
)
from hybrid_jax.checking.subject import CHUNK, Subject
from hybrid_jax.loading import load_model
from hybrid_jax.runtime.batch import StepBatch, StepKind
from hybrid_jax.specs import PagedSpec, WindowSpec
from tests.helpers import tiny
from tests.helpers.real_engine import random_prompt

PROMPTS = [list(random_prompt(length, 0)) for length in (5, 17, 40)]
LONG = list(random_prompt(CHUNK + 40, 0))
TURNS = [list(random_prompt(length, 1)) for length in (130, 5, 9)]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A tiny model of all kinds of layers, compiled once."""
    path = tiny.write_checkpoint("lara_mini-untied", tmp_path_factory.mktemp("tiny"), seed=0)
    model = load_model(path, dtype="float32")
    return Subject(model, max_num_seqs=len(PROMPTS), max_model_len=len(LONG) + NUM_TOKENS)


@pytest.fixture
def subject(tested: Subject, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    """The same, whose runner a test may break."""
    yield tested


def break_steps(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, fault: Callable[[StepBatch], StepBatch]
) -> None:
    """What the engine built is replaced on its way to the device."""
    step = subject._runner.step
    monkeypatch.setattr(
        subject._runner, "step", lambda batch, sampling: step(fault(batch), sampling)
    )


def with_tables(
    subject: Subject, batch: StepBatch, kind: type[PagedSpec], change: Callable[[Any], None]
) -> StepBatch:
    """The batch with the page tables of full attention, or of windows, changed."""
    tables = list(batch.tables)
    for i, group in enumerate(subject._runner.groups):
        if type(group.spec) is kind:
            tables[i] = np.array(tables[i])
            change(tables[i])
    return replace(batch, tables=tuple(tables))


@pytest.mark.slow
def test_a_sound_engine_passes(subject: Subject) -> None:
    (isolation, decode), texts = check_isolation(subject, PROMPTS, NUM_TOKENS)
    long = check_long_prompt(subject, LONG, NUM_TOKENS)
    session, prefix = check_turns(subject, TURNS, NUM_TOKENS)
    seed = check_seed(subject, PROMPTS, NUM_TOKENS, seed=3)
    assert [f.verdict for f in (isolation, decode, long, session, prefix, seed)] == ["pass"] * 6
    assert [len(text) for text in texts] == [NUM_TOKENS] * 3
    assert "36 of 36 tokens" in decode.detail
    assert "296 tokens in chunks of 256" in long.detail
    assert "(0, 128, " in prefix.detail  # two blocks of the linear layers


def test_rows_that_read_each_others_pages(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only in decode steps of several rows: alone the model is right."""

    def swap(batch: StepBatch) -> StepBatch:
        if batch.kind is not StepKind.DECODE or np.asarray(batch.counts)[1] < 2:
            return batch

        def change(table: Any) -> None:
            table[[0, 1]] = table[[1, 0]]

        return with_tables(subject, batch, PagedSpec, change)

    break_steps(subject, monkeypatch, swap)
    (isolation, decode), _ = check_isolation(subject, PROMPTS, NUM_TOKENS)
    assert isolation.verdict == "fail" and isolation.figure >= 1
    assert decode.verdict == "pass"


def test_chunks_that_see_a_wrong_past(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first page is the second one, in prefill steps that are not the first of a sequence."""

    def second_page_twice(batch: StepBatch) -> StepBatch:
        if batch.kind is StepKind.DECODE or not np.asarray(batch.positions)[0]:
            return batch

        def change(table: Any) -> None:
            table[0, 0] = table[0, 1]

        return with_tables(subject, batch, PagedSpec, change)

    break_steps(subject, monkeypatch, second_page_twice)
    long = check_long_prompt(subject, LONG, NUM_TOKENS)
    turns = check_turns(subject, TURNS, NUM_TOKENS)
    (isolation, decode), _ = check_isolation(subject, PROMPTS, NUM_TOKENS)
    assert [f.verdict for f in (long, *turns)] == ["fail"] * 3
    assert [f.verdict for f in (isolation, decode)] == ["pass"] * 2  # these fit one chunk


def test_a_window_page_that_is_given_back_too_early(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps find the page they write where the one before should be."""

    def forget(batch: StepBatch) -> StepBatch:
        if batch.kind is not StepKind.DECODE:
            return batch
        pages = np.asarray(batch.positions) // subject._runner.config.page_size

        def change(table: Any) -> None:
            rows = np.arange(len(table))
            table[:] = table[rows, pages % table.shape[1]][:, None]

        return with_tables(subject, batch, WindowSpec, change)

    break_steps(subject, monkeypatch, forget)
    (_, decode), _ = check_isolation(subject, PROMPTS, NUM_TOKENS)
    assert decode.verdict == "fail"


def test_a_cache_that_never_hits_is_no_success(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    match = PrefixTree.match

    def forgetful(tree: PrefixTree, *args: Any) -> Match:
        found = match(tree, *args)
        return replace(found, prefix=Prefix(0, tuple(() for _ in found.prefix.ids)))

    monkeypatch.setattr(PrefixTree, "match", forgetful)
    session, prefix = check_turns(subject, TURNS, NUM_TOKENS)
    assert session.verdict == "pass"
    assert prefix.verdict == "fail" and prefix.detail.startswith("no turn finds")


@pytest.mark.parametrize("wrong", ["ignored", "counted on"])
def test_seeds_that_do_not_decide(
    wrong: str, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, calls = subject._runner.sampling_rows, iter(range(100, 200))
    set_row = rows.set_row

    def other(row: int, params: Any, seed: int, *args: Any, **kwargs: Any) -> None:
        seed = 7 if wrong == "ignored" else next(calls)
        set_row(row, params, seed, *args, **kwargs)

    monkeypatch.setattr(rows, "set_row", other)
    finding = check_seed(subject, PROMPTS, NUM_TOKENS, seed=3)
    assert finding.verdict == "fail"
    if wrong == "ignored":
        assert finding.detail == "seeds 3 and 4 give the same text"
    else:
        assert "the same seed gives another text" in finding.detail


def test_a_text_that_the_engine_ends_fails_its_check_alone(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long prompt's steps raise; the other checks go on."""

    def refuse(batch: StepBatch) -> StepBatch:
        if np.asarray(batch.positions).max() >= CHUNK:
            raise RuntimeError("out of memory")
        return batch

    break_steps(subject, monkeypatch, refuse)
    texts = check._Texts(PROMPTS, LONG, TURNS, NUM_TOKENS)
    found = {f.check: f for f in check._run(subject, texts, None, 3).findings}
    failed = {name for name, finding in found.items() if finding.verdict == "fail"}
    assert failed == {"long prompt"}
    assert "out of memory" in found["long prompt"].detail


def test_repetition() -> None:
    loop, prose = [7, 8, 9] * 20, list(range(60))
    assert repeated_share(prose) == 0 and repeated_share([1, 2]) == 0
    # 57 4-grams, of which three differ.
    assert repeated_share(loop) == pytest.approx(54 / 57)
    assert check_repetition([prose], None, ()).verdict == "pass"
    found = check_repetition([loop, prose], None, ())
    assert (found.verdict, found.figure) == ("warn", 1) and "1 of 2 texts loop" in found.detail
    assert check_repetition([loop, prose], [loop, prose], ()).verdict == "pass"
    assert check_repetition([loop, prose], [prose, prose], ()).verdict == "fail"
    assert check_repetition([prose, prose], [loop, prose], ()).verdict == "pass"
    # What follows the end of a text was only asked for to compare it.
    assert check_repetition([[1, 2, 0, *loop]], None, (0,)).verdict == "pass"
