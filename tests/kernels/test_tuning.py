"""Tuned block sizes: who is asked in which order, what the files hold, and what the tuner keeps."""

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from pallas_kernels import bench, platform, registry, static_profile, tuning
from pallas_kernels.gla import reference
from pallas_kernels.tpu_chip import CHIPS, head_block
from tests.helpers.tpu import pretend_libtpu

KIND = "TPU v6 lite"
KEY = "op.size 4x8"


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files of tuned sizes of this test alone: packaged and the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "PACKAGED", tmp_path / "packaged")
    tuning._tuned.cache_clear()
    yield tmp_path
    tuning._tuned.cache_clear()


def pick() -> int:
    with platform.target("tpu", KIND):
        return tuning.pick("op.size", (4, 8), (1, 2, 4), 4)


def test_the_order_of_answers(own_files: Path) -> None:
    assert pick() == 4  # the kernel's own rule
    packaged = own_files / "packaged" / tuning.file_name(KIND)
    packaged.parent.mkdir()
    packaged.write_text(
        json.dumps({"device_kind": KIND, "sizes": {KEY: {"size": 2}, "op.size 1": {"size": 9}}})
    )
    tuning._tuned.cache_clear()
    assert pick() == 2
    tuning.write(KIND, {KEY: {"size": 1}})
    assert pick() == 1
    with tuning.trying({KEY: 4}):
        assert pick() == 4
    assert pick() == 1
    with platform.target("tpu", "TPU v4"):
        assert tuning.pick("op.size", (4, 8), (1, 2, 4), 4) == 4  # nothing is known of this one


def test_a_size_that_does_not_work_any_more_is_left_aside(caplog: pytest.LogCaptureFixture) -> None:
    tuning.write(KIND, {KEY: {"size": 3}})
    with caplog.at_level(logging.WARNING):
        assert pick() == 4
    assert "op.size 4x8: the tuned size 3 is none of (1, 2, 4), so 4 is used" in caplog.text


def test_writing_keeps_what_others_wrote_and_damage_is_named(own_files: Path) -> None:
    tuning.write(KIND, {KEY: {"size": 1}})
    path = tuning.write(KIND, {"op.other 3": {"size": 7}})
    assert path == own_files / "cache/hybrid-jax/tuned/tpu_v6_lite.json"
    assert set(json.loads(path.read_text())["sizes"]) == {KEY, "op.other 3"}
    for content in ("{", "[]", '{"sizes": {"a": 3}, "device_kind": "TPU v6 lite"}',
                    '{"sizes": {"a": {}}, "device_kind": "TPU v6 lite"}',
                    '{"sizes": {"a": {"size": 2.0}}, "device_kind": "TPU v6 lite"}',
                    '{"sizes": {"a": {"size": 2, "by": "eye"}}, "device_kind": "TPU v6 lite"}',
                    '{"sizes": {}, "device_kind": "TPU v4"}'):  # fmt: skip
        path.write_text(content)
        tuning._tuned.cache_clear()
        with pytest.raises(ValueError, match=r"v6_lite.json is no file of tuned sizes .*remove"):
            pick()


def test_kernels_ask(own_files: Path) -> None:
    """Head blocks on a TPU: whole groups of heads, or parts of one."""
    with platform.target("tpu", KIND), tuning.asking() as questions:
        assert head_block("op.heads", (2, 8, 128), 8, CHIPS[KIND]) == 8
        with tuning.trying({"op.heads 2x8x128": 2}):
            assert head_block("op.heads", (2, 8, 128), 8, CHIPS[KIND]) == 2
    assert questions == {"op.heads 2x8x128": ((4, 8, 1, 2), 8)}


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """`gla` with one implementation, which asks for two sizes, one of which changes nothing: those
    it was traced with.
    """
    traced: list[int] = []

    def run(q: jax.Array, *arguments: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        traced.append(tuning.pick("gla.size", q.shape[1:], (1, 2, 4), 4))
        tuning.pick("gla.other_size", q.shape[1:], (1, 2), 2)
        return reference.gla(q * traced[-1], *arguments, **options)

    entry = registry._Entry(lambda: (run, registry.never))
    monkeypatch.setitem(registry._registry._entries, "gla", {registry.REFERENCE: entry})
    return traced


def slower_by_size(traced: list[int], factors: dict[int, float]) -> Callable[[], float]:
    """A clock that goes on by what the size costs that was sampled last.

    Sizes are sampled in the order of the candidates, then in turns: reversed, in order, ...
    """
    order = itertools.chain(*([size] * 4 for size in (1, 2, 4)))  # compiling, then one sample
    turns = itertools.cycle((4, 4, 2, 2, 1, 1, 1, 1, 2, 2, 4, 4))
    now = 0.0
    odd = True

    def clock() -> float:
        nonlocal now, odd
        odd = not odd
        size = next(order, None) or next(turns)
        now += factors[size] if odd else 0.0
        return now

    return clock


@pytest.mark.parametrize(("factors", "kept"), [((3.0, 1.0, 2.0), 2), ((3.0, 1.99, 2.0), 4)])
def test_the_tuner_keeps_what_is_faster_by_more_than_noise(
    sized: list[int], factors: tuple[float, ...], kept: int
) -> None:
    cost: dict[int, float] = dict(zip((1, 2, 4), factors, strict=True))
    options = {"cases": ["tiny"], "rows": 2, "context": 3, "tokens": 3, "rounds": 2}
    (tuned,) = bench.tune_op("gla", clock=slower_by_size(sized, cost), **options)
    assert set(sized) == {1, 2, 4} and tuned.default == 4
    assert tuned.costs == pytest.approx(cost) and tuned.size == kept
    assert tuned.entry()["size"] == kept and tuned.key == "gla.size 2x8"
    assert tuned.entry()["by"] == "time" and tuned.entry()["seconds"] == tuned.costs


def test_the_command(own_files: Path) -> None:
    """No implementation that runs on a CPU has sizes to tune. No file is left."""
    command = [sys.executable, "-m", "pallas_kernels.bench", "gla", "--case", "tiny", "--tune"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "what runs gla on cpu has no block sizes" in done.stderr
    assert done.stderr.count("\n") == 1 and not any(own_files.iterdir())
    done = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "leave out --json" in done.stderr


def test_what_the_command_writes_is_used(
    sized: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = {1: 1.0, 2: 2.0, 4: 2.0}
    tune = bench.tune_op
    clocked = lambda op, **options: tune(op, clock=slower_by_size(sized, cost), **options)  # noqa: E731
    monkeypatch.setattr(bench, "tune_op", clocked)
    options = ["--case", "tiny", "--rows", "2", "--context", "3", "--tokens", "3", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["bench", "gla", *options, "--tune"])
    bench.main()
    assert "1: 1000.000, 2: 2000.000, 4: 2000.000" in capsys.readouterr().out
    kind = platform.current().kind
    assert tuning.entries(kind)["gla.size 2x8"]["size"] == 1
    assert tuning.pick("gla.size", (2, 8), (1, 2, 4), 4) == 1


def refused(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the command says when it refuses its options: one line, with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    with pytest.raises(SystemExit) as raised:
        bench.main()
    out, err = capsys.readouterr()
    assert raised.value.code == 2 and not out and err.count("\n") == 1
    return err


def test_a_directory_that_cannot_be_written_is_named_before_anything_is_tried(
    own_files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_files / "cache").write_text("a file")
    monkeypatch.setattr(bench, "tune_op", None)
    line = refused(["gla", "--case", "tiny", "--tune"], monkeypatch, capsys)
    assert f"{own_files}/cache/hybrid-jax/tuned cannot be written" in line
    assert "set XDG_CACHE_HOME" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tune", "--chip", "h100"], "no static profile for chip 'h100', only for v5e, v6e,"),
        (["--tune", "--chip", "h100"], "run on the device itself, without --chip"),
        (["--tune", "--chip", "v6e"], "pip install 'hybrid-jax[test]'"),
        (["--chip", "h100"], "no static profile for chip 'h100', only for v5e, v6e,"),
        (["--chip", "v6e"], "pip install 'hybrid-jax[test]'"),
        (["--chip", "v6e", "--cpu-seconds", "0"], "cpu-seconds must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_chips_that_nothing_can_be_said_of(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pretend_libtpu(monkeypatch, installed=False)
    assert said in refused(["gla", "--case", "tiny", *options], monkeypatch, capsys)


def test_profiles_of_a_chip_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def profile(trial: static_profile.Trial, kernel: str, cpu_seconds: int) -> int:
        assert platform.current().kind == KIND and cpu_seconds == 9
        if trial.batch.new > 1 and "decode" in kernel:
            raise static_profile.NoProfileError("took too long")
        return 3500 * trial.batch.tokens

    pretend_libtpu(monkeypatch, installed=True)
    monkeypatch.setattr(static_profile, "_profile", profile)
    monkeypatch.setattr(bench.metadata, "version", lambda name: f"{name} 1.0")
    options = ["gla", "--case", "gla_1b", "--rows", "2", "--tokens", "3", "--chip", "v6e"]
    options += ["--cpu-seconds", "9"]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    bench.main()
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["case", "batch", "kernel", "cycles", "us", "of", "its", "bytes", "us"]
    cells = [line.split("  ") for line in lines]
    cells = [[cell.strip() for cell in line if cell] for line in cells]
    assert [(x[1], x[2], x[3], x[5]) for x in cells] == [
        ("decode 2 x 1,024", "gla_decode", "7,000", "4.0"),
        ("prefill 3", "gla_decode", "-", "took too long"),
        ("prefill 3", "gla_prefill", "10,500", "6.0"),
    ]
    monkeypatch.setattr(sys, "argv", ["bench", *options, "--json", "-"])
    bench.main()
    report = json.loads(capsys.readouterr().out)
    assert (report["chip"], report["libtpu"]) == ("v6e", "libtpu 1.0")
    assert [x["cycles"] for x in report["profiles"]] == [7000, None, 10_500]


def test_an_op_without_sizes_on_a_chip(
    own_files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_libtpu(monkeypatch, installed=True)
    options = ["rows", "--case", "tiny", "--tune", "--chip", "v6e"]
    line = refused(options, monkeypatch, capsys)
    assert "what runs rows on TPU v6 lite has no block sizes" in line and "take others" in line
    assert not any(own_files.iterdir())


def tune_for_v6e(
    cycles: dict[int, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the command prints if these are the cycles by size, and other sizes have none."""

    def profile_sizes(call: Any, trial: static_profile.Trial, sizes: Sequence[int]) -> Any:
        assert (trial.op, trial.case, trial.chip) == ("gla", "tiny", "v6e")
        assert platform.current().kind == KIND
        return cycles, {size: "took too long" for size in sizes if size not in cycles}

    pretend_libtpu(monkeypatch, installed=True)
    monkeypatch.setattr(static_profile, "profile_sizes", profile_sizes)
    monkeypatch.setattr(bench.metadata, "version", lambda name: f"{name} 1.0")
    options = ["--case", "tiny", "--rows", "2", "--tokens", "3", "--tune", "--chip", "v6e"]
    monkeypatch.setattr(sys, "argv", ["bench", "gla", *options])
    bench.main()
    return capsys.readouterr().out


def test_sizes_by_static_profile_are_marked_and_never_replace_timed_ones(
    sized: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key, cycles = "gla.size 2x8", {1: 20_000, 2: 10**5, 4: 30_000}
    printed = tune_for_v6e(cycles, monkeypatch, capsys)
    assert "1: 20,000, 2: 100,000, 4: 30,000" in printed and "written to" in printed
    entry = tuning.entries(KIND)[key]
    assert entry["size"] == 1 and entry["by"] == "static profile" and "seconds" not in entry
    assert entry["cycles"] == {"1": 20_000, "2": 10**5, "4": 30_000}
    assert entry["libtpu"] == "libtpu 1.0"
    tune_for_v6e(cycles | {1: 40_000, 2: 20_000}, monkeypatch, capsys)
    assert tuning.entries(KIND)[key]["size"] == 2  # a static one does replace a static one
    for timed in ({"size": 4, "by": "time"}, {"size": 4}):
        tuning.write(KIND, {key: timed})
        printed = tune_for_v6e(cycles, monkeypatch, capsys)
        assert "4, found by time" in printed and "nothing is written" in printed
        assert tuning.entries(KIND) == {key: timed}


def test_sizes_without_a_profile_are_left_out(
    sized: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = tune_for_v6e({2: 20_000, 4: 30_000}, monkeypatch, capsys)
    assert "gla.size 2x8: size 1 is left out: took too long" in printed
    assert tuning.entries(KIND)["gla.size 2x8"]["size"] == 2
    printed = tune_for_v6e({1: 20_000, 2: 30_000}, monkeypatch, capsys)
    assert "nothing: own rule has no figure" in printed and "nothing is written" in printed
    assert tuning.entries(KIND)["gla.size 2x8"]["size"] == 2


# The command with a compiler that profiles the kernel whose name holds PROFILED and then waits.
COMPILER = """#!/bin/sh
case "$4" in
*$PROFILED*) printf 'hlo_op_name: "%s"\\nestimated_cycles: 900000000' "$4" \\
    > "${LIBTPU_INIT_ARGS#*=}/a_static_llo_profile.textproto" ;;
*) echo $$ > "$STARTED.part"; mv "$STARTED.part" "$STARTED"; exec sleep 300 ;;
esac
"""
COMMAND = """
import importlib.util, sys
from importlib import metadata
from pallas_kernels import bench, static_profile

find, version = importlib.util.find_spec, metadata.version
importlib.util.find_spec = lambda name, *rest: find("json" if name == "libtpu" else name, *rest)
metadata.version = lambda name: "1.0" if name == "libtpu" else version(name)
sys.executable, sys.argv[0] = sys.argv.pop(1), "bench"
bench.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("profiled", "kept"), [("decode", 1), ("none", 0)])
def test_a_signal_ends_the_compiler_and_keeps_what_was_found(
    profiled: str, kept: int, number: signal.Signals, own_files: Path
) -> None:
    compiler, started = own_files / "compiler", own_files / "started"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    options = ["gla", "--case", "gla_1b", "--rows", "2", "--tokens", "8", "--tune", "--chip", "v6e"]
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(compiler), *options],
        env=os.environ | {"PROFILED": profiled, "STARTED": str(started), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not started.exists() and command.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    command.send_signal(number)
    out, err = command.communicate(timeout=60)
    assert command.returncode == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    written = f"written to {tuning.user_directory() / tuning.file_name(KIND)}"
    what = written if kept else "nothing is written"
    assert err == f"bench: stopped by {number.name}; {what}\n"
    assert len(tuning.entries(KIND)) == kept and ("gla.decode_heads" in out) == bool(kept)
