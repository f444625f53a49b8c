"""Sessions, forks and snapshots: tokens as from the beginning, and nothing computed twice."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_jax import LLM, SamplingParams, Snapshot
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.errors import CachesFull, InvalidRequest, SnapshotError
from hybrid_jax.session import Session
from tests.helpers.engine_checks import drive, greedy
from tests.helpers.real_engine import MAX_LEN, Rig, random_prompt

GetRig = Callable[[str], Rig]
NAMES = ["lara_mini", "qwen3_5"]


def opened(rig: Rig, **options: Any) -> tuple[LLM, Engine]:
    engine = rig.engine(debug_poison=True, **options)
    return LLM.from_engine(engine, None), engine


def say(session: Session, rig: Rig, length: int, new: int, seed: int) -> int:
    """A turn that must equal the oracle's; returns the tokens that were found in the caches."""
    before, prompt = list(session.token_ids), list(random_prompt(length, seed))
    output = session.generate(prompt, greedy(new))
    tokens = output.outputs[0].token_ids
    assert tokens == rig.oracle((*before, *prompt), new)
    assert session.token_ids == [*before, *prompt, *tokens]
    report = output.outputs[0].cache
    assert report is not None
    return report.cached_tokens


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_turn_computes_nothing_but_its_new_tokens(
    name: str, run_ahead: bool, rig: GetRig
) -> None:
    """While others run, evict everything that is cached, and preempt each other."""
    rig_ = rig(name)
    llm, engine = opened(rig_, run_ahead=run_ahead, longest=60, spare=20)
    with llm.session() as session:
        assert say(session, rig_, 9, 5, 0) == 0
        for turn in range(1, 4):
            others = [Request(f"o{turn}{i}", random_prompt(20, i), greedy(9)) for i in range(4)]
            for request in others:
                engine.add_request(request)
            rig_.oracle.check(drive(engine), others)
            known = len(session.token_ids)
            assert say(session, rig_, turn, 6, turn) == known - 1  # the last one was never fed
        assert any(group.used for group in engine.stats().caches)
    rig_.assert_clean(engine)


@pytest.mark.parametrize("name", NAMES)
def test_forks_share_the_past_and_nothing_else(name: str, rig: GetRig) -> None:
    rig_ = rig(name)
    llm, engine = opened(rig_)
    trunk = llm.session()
    say(trunk, rig_, 13, 4, 0)
    used = [group.used for group in engine.stats().caches]
    branches = [trunk.fork() for _ in range(3)]
    assert [group.used for group in engine.stats().caches] == used  # no memory, no copy
    known = len(trunk.token_ids)
    for seed, branch in enumerate(branches):
        assert say(branch, rig_, 2, 5, seed) == known - 1
    assert say(trunk, rig_, 3, 5, 9) == known - 1
    for seed, branch in enumerate(reversed(branches)):
        say(branch, rig_, 1, 3, seed)
    for session in (trunk, *branches):
        session.close()
        session.close()
    for use in (lambda: trunk.generate([1]), trunk.fork, trunk.snapshot):
        with pytest.raises(InvalidRequest, match="the session is closed; open another"):
            use()
    rig_.assert_clean(engine)


@pytest.mark.parametrize("decoded", [0, 1, 6])
def test_a_running_request_can_be_forked(decoded: int, rig: GetRig) -> None:
    """At any point of its life, with a step in flight."""
    rig_ = rig("lara_mini")
    engine, prompt = rig_.engine(debug_poison=True), random_prompt(21, 1)
    engine.add_request(Request("parent", prompt, greedy(14)))
    events = []
    while sum(len(e.new_token_ids) for e in events) < decoded or not events:
        events += engine.step()
        if not decoded:
            break
    prefix = engine.hold("parent")
    children = [prefix.token_ids + random_prompt(n, n) for n in (1, 5)]
    prefixes = [prefix, engine.kept.share(prefix)]
    for i, (tokens, kept) in enumerate(zip(children, prefixes, strict=True)):
        engine.add_request(Request(f"child{i}", tokens, greedy(5), prefix=kept))
    record = drive(engine)
    new = [t for e in events for t in e.new_token_ids] + record.tokens[("parent", 0)]
    assert new == rig_.oracle(prompt, 14)
    for i, tokens in enumerate(children):
        assert record.tokens[(f"child{i}", 0)] == rig_.oracle(tokens, 5)
        assert record.finals[f"child{i}"].usage.cached_tokens == prefix.length  # type: ignore[union-attr]
    rig_.assert_clean(engine)
    with pytest.raises(InvalidRequest, match="'parent' is not running"):
        engine.hold("parent")


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_goes_on_where_it_was_made(name: str, rig: GetRig, tmp_path: Path) -> None:
    """In another engine whose memory held other things; from a file; more than once."""
    rig_ = rig(name)
    llm, _ = opened(rig_)
    session = llm.session()
    say(session, rig_, 23, 7, 0)
    snapshot, known = session.snapshot(), list(session.token_ids)
    snapshot.save(tmp_path / "session.safetensors")
    say(session, rig_, 2, 3, 1)  # the snapshot is a copy
    llm, engine = opened(rig_)
    for source in (snapshot, Snapshot.load(tmp_path / "session.safetensors")):
        with llm.session(source) as restored, llm.session(source) as other:
            assert restored.token_ids == known
            assert say(restored, rig_, 2, 6, 2) == len(known) - 1
            assert say(other, rig_, 9, 4, 3) == len(known) - 1
    rig_.assert_clean(engine)


def test_a_snapshot_survives_the_process(tmp_path: Path) -> None:
    """The bundled model in two processes: the second computes only what is new."""
    program = """
import sys
from hybrid_jax import LLM, SamplingParams, Snapshot
from hybrid_jax.bundled import bundled_model
llm = LLM(bundled_model(), max_num_seqs=2, max_model_len=256)
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
path, phase = sys.argv[1:]
session = llm.session(Snapshot.load(path) if phase == "second" else None)
if phase == "first":
    session.generate("In the beginning God created", params)
    session.snapshot().save(path)
output = session.generate(" And the earth", params)
print(output.outputs[0].cache.cached_tokens, output.outputs[0].token_ids)
"""
    path = str(tmp_path / "s.safetensors")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}  # the second need not compile
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program, path, phase],
            capture_output=True, text=True, check=True, env=environment,
        ).stdout
        for phase in ("first", "second")
    ]  # fmt: skip
    assert outputs[0] == outputs[1]
    assert int(outputs[0].split()[0]) > 8


def test_a_snapshot_of_something_else_is_refused(rig: GetRig, tmp_path: Path) -> None:
    rig_ = rig("lara_mini")
    llm, engine = opened(rig_)
    with pytest.raises(SnapshotError, match="generate before a snapshot"):
        llm.session().snapshot()
    with pytest.raises(SnapshotError, match="'a.safetensors' is no Snapshot"):
        llm.session("a.safetensors")  # type: ignore[arg-type]
    session = llm.session()
    session.generate(list(random_prompt(9, 0)), greedy(3))
    snapshot = session.snapshot()
    session.close()
    other, _ = opened(rig("qwen3_5"))
    with pytest.raises(SnapshotError, match="other weights"):
        other.session(snapshot)
    llm, engine = opened(rig_)
    with pytest.raises(SnapshotError, match="restore it with page_size=8"):
        llm.session(replace(snapshot, page_size=8))
    for name, content in (("empty", b""), ("text", b"hello" * 9)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SnapshotError, match="cannot be read"):
            Snapshot.load(tmp_path / name)
    with pytest.raises(SnapshotError, match="cannot be read"):
        Snapshot.load(tmp_path / "missing")
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(3)}, tmp_path / "other")
    with pytest.raises(SnapshotError, match="no snapshot of version 1"):
        Snapshot.load(tmp_path / "other")
    shapes = {"F8_E4M3": [2], "F8_E5M2": [2], "U8": [0, 2**63]}
    for dtype, shape in shapes.items():  # which safetensors has and numpy has not
        header = {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, shape[0]]}}
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + bytes(shape[0])
        (tmp_path / "odd").write_bytes(content)
        with pytest.raises(SnapshotError, match="cannot be read"):
            Snapshot.load(tmp_path / "odd")
    sessions = [llm.session(snapshot)]
    with pytest.raises(SnapshotError, match="close sessions"):
        while True:
            sessions.append(llm.session(snapshot))
    for each in sessions:
        each.close()
    rig_.assert_clean(engine)


def test_a_damaged_snapshot_is_refused_and_takes_nothing(rig: GetRig) -> None:
    rig_ = rig("lara_mini")
    llm, engine = opened(rig_)
    session = llm.session()
    say(session, rig_, 23, 7, 0)
    good = session.snapshot()
    used = [group.used for group in engine.stats().caches]
    for name, array in good.arrays.items():
        for bad in (None, array[..., :-1], array[:0], np.repeat(array, 9, 0), array.astype("f2")):
            arrays = {k: v for k, v in good.arrays.items() if k != name}
            arrays |= {} if bad is None else {name: bad}
            with pytest.raises(SnapshotError, match="it is damaged, make it again"):
                llm.session(replace(good, arrays=arrays))
    for length in (0, -1, len(good.token_ids) + 1, 3):  # 3 tokens do not need so many pages
        with pytest.raises(SnapshotError, match="it is damaged, make it again"):
            llm.session(replace(good, length=length))
    assert [group.used for group in engine.stats().caches] == used
    with llm.session(good) as restored:
        say(restored, rig_, 2, 3, 1)
    session.close()
    rig_.assert_clean(engine)


def test_a_snapshot_that_cannot_be_written_leaves_nothing_behind(
    rig: GetRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig_ = rig("lara_mini")
    llm, engine = opened(rig_)
    with llm.session() as session:
        say(session, rig_, 9, 3, 0)
        snapshot = session.snapshot()
    used = [group.used for group in engine.stats().caches]

    def fails(*_: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(engine.kept._runner, "write", fails)
        llm.session(snapshot)
    assert [group.used for group in engine.stats().caches] == used
    rig_.assert_clean(engine)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_snapshot_brings_is_nobody_elses(name: str, rig: GetRig) -> None:
    """One that holds something else than its tokens say changes no other request's tokens.

    Nor do the turns after it, nor their forks.
    """
    rig_ = rig(name)
    llm, engine = opened(rig_, prefill_alignment=8, checkpoint_interval=8)
    with llm.session() as session:
        session.generate(list(random_prompt(21, 0)), greedy(4))
        snapshot = session.snapshot()
    forged = replace(snapshot, token_ids=random_prompt(25, 1))
    with llm.session(forged) as session, session.fork() as fork:
        for turn, new in ((session, 12), (fork, 20), (session, 6)):
            turn.generate([5], greedy(new))
            (victim,) = llm.generate([[*turn.token_ids, 6]], greedy(4), use_tqdm=False)
            assert victim.outputs[0].token_ids == rig_.oracle((*turn.token_ids, 6), 4)
    rig_.assert_clean(engine)


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_that_was_edited_is_not_mended_by_the_prefix_cache(
    name: str, rig: GetRig
) -> None:
    """A longer prefix of the same tokens is cached; the session goes on from what it was given."""
    rig_ = rig(name)
    tokens, turn = random_prompt(25, 1), [5] * 24
    answers = []
    for others in ((), (*tokens, *turn, 6)):
        llm, engine = opened(rig_, prefill_alignment=8, checkpoint_interval=8)
        with llm.session() as session:
            session.generate(list(random_prompt(21, 0)), greedy(4))
            edited = replace(session.snapshot(), token_ids=tokens)
        if others:
            llm.generate([list(others)], greedy(2), use_tqdm=False)
        with llm.session(edited) as session:
            output = session.generate(turn, greedy(12)).outputs[0]
            assert output.cache is not None and output.cache.cached_tokens == edited.length
            answers.append(output.token_ids)
        rig_.assert_clean(engine)
    assert answers[0] == answers[1]
    assert answers[0] != rig_.oracle((*tokens, *turn), 12)  # the edit shows


def test_a_fork_of_a_session_whose_memory_is_gone_computes_it_again(rig: GetRig) -> None:
    rig_ = rig("lara_mini")
    llm, engine = opened(rig_)
    session = llm.session()
    say(session, rig_, 9, 3, 0)
    assert session._prefix is not None
    engine.kept.drop(session._prefix)  # as an interrupt during a turn does
    engine.clear_prefix_cache()
    with session.fork() as fork:
        assert say(fork, rig_, 4, 3, 1) == 0
    assert say(session, rig_, 4, 3, 2) >= 0
    session.close()
    rig_.assert_clean(engine)


def test_a_session_refuses_what_it_cannot_do_and_goes_on(rig: GetRig) -> None:
    rig_ = rig("lara_mini")
    llm, engine = opened(rig_)
    session = llm.session()
    say(session, rig_, 5, 3, 0)
    with pytest.raises(InvalidRequest, match="n=2"):
        session.generate([3], SamplingParams(n=2))
    with pytest.raises(InvalidRequest, match="max_model_len"):
        session.generate([3] * MAX_LEN, greedy(1))
    known = len(session.token_ids)
    assert say(session, rig_, 4, 3, 1) == known - 1
    prefix = session._prefix
    with pytest.raises(InvalidRequest, match="does not begin with"):
        engine.add_request(Request("x", (5,) * 40, greedy(1), prefix=prefix))
    session.close()
    rig_.assert_clean(engine)


def test_a_request_that_sessions_leave_no_room_for_says_so(rig: GetRig) -> None:
    rig_ = rig("lara_mini")
    llm, engine = opened(rig_, longest=60)
    session = llm.session()
    say(session, rig_, 33, 2, 0)
    (output,) = llm.generate([list(random_prompt(40, 1))], greedy(2), use_tqdm=False)
    assert isinstance(output.outputs[0].error, CachesFull)
    assert "1 sessions hold 34 tokens, close some" in str(output.outputs[0].error)
    session.close()
    (output,) = llm.generate([list(random_prompt(40, 1))], greedy(2), use_tqdm=False)
    assert output.outputs[0].token_ids == rig_.oracle(random_prompt(40, 1), 2)
    rig_.assert_clean(engine)


def test_a_session_outlives_an_engine_that_recovered(
    rig: GetRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is gone; the next turn computes it again."""
    rig_ = rig("lara_mini")
    llm, engine = opened(rig_)
    session = llm.session()
    say(session, rig_, 9, 3, 0)
    with monkeypatch.context() as patch:
        patch.setattr(rig_.runner, "step", lambda *_: 1 / 0)
        output = llm.generate([[5, 6]], greedy(2), use_tqdm=False)[0]
        assert output.outputs[0].finish_reason == "error"
    with pytest.raises(SnapshotError, match="memory is gone"):
        session.snapshot()
    assert say(session, rig_, 4, 3, 1) == 0
    assert say(session, rig_, 4, 3, 1) > 0
    session.close()
    rig_.assert_clean(engine)
