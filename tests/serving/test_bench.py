"""The load generator counts what it did, against a server whose answers are known."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_jax.measure import RequestTimes
from serving import cli
from serving.bench import Client, Load, Workload, run, summary
from tests.helpers.http_server import MODEL, HttpServer

Serve = Callable[..., HttpServer]


def measure(server: HttpServer, workload: Workload, load: Load) -> tuple[list[RequestTimes], float]:
    async def work() -> tuple[list[RequestTimes], float]:
        client = Client(server.url, MODEL, extra={"ignore_eos": True})
        try:
            return await run(client, workload, load)
        finally:
            await client.close()

    return asyncio.run(work())


def test_workloads_are_what_they_say_and_repeatable() -> None:
    for name in ("random", "shared-prefix", "multi-turn"):
        workload = Workload(name, sessions=5, prompt_words=9, prefix_words=20, turns=3)
        sessions = workload.make()
        assert sessions == workload.make() != Workload(name, 5, 9, 20, 3, seed=1).make()
        assert [len(turns) for turns in sessions] == [3 if name == "multi-turn" else 1] * 5
        words = [turn.split() for turns in sessions for turn in turns]
        assert {len(w) for w in words} == {29 if name == "shared-prefix" else 9}
        starts = {tuple(w[:20]) for w in words}
        assert (len(starts) == 1) == (name == "shared-prefix")


@pytest.mark.parametrize(
    "options, words",
    [
        (("--sessions", "0"), "sessions must be at least 1, got 0"),
        (("--turns", "0"), "turns must be at least 1, got 0"),
        (("--max-tokens", "0"), "max_tokens must be at least 1, got 0"),
        (("--prefix-words", "-1"), "prefix_words must be at least 0, got -1"),
        (("--concurrency", "0"), "must be positive, got Load(rate=None, concurrency=0)"),
        (("--rate", "nan"), "must be positive, got Load(rate=nan"),
    ],
)
def test_a_load_that_is_none_is_refused_before_a_server_is_asked(
    options: tuple[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["hybrid-jax", "bench", "serve", "--url", "http://127.0.0.1:1", *options]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_the_summary_adds_up() -> None:
    good = RequestTimes(ttft=1.0, gaps=[0.5, 1.5], e2e=3.0, prompt_tokens=7, output_tokens=5)
    slow = RequestTimes(
        ttft=4.0, gaps=[], e2e=4.0, prompt_tokens=1, output_tokens=1, cached_tokens=1
    )
    report = summary([good, slow, RequestTimes(error="gone")], 2.0, {"ttft": 1.0, "e2e": 10.0})
    assert good.tpot == 0.5 and slow.tpot is None
    assert (report["requests"], report["failed"], report["errors"]) == (3, 1, {"gone": 1})
    assert (report["prompt_tokens"], report["cached_tokens"], report["output_tokens"]) == (8, 1, 6)
    assert report["output_tokens_per_second"] == 3.0 and report["requests_per_second"] == 1.0
    assert report["goodput_requests_per_second"] == 0.5
    assert report["itl_seconds"]["p99"] == 1.5 and report["tpot_seconds"]["p50"] == 0.5


@pytest.mark.parametrize("load", [Load(concurrency=4), Load(rate=100.0)])
def test_every_request_is_measured(serve_bundled: Serve, load: Load) -> None:
    workload = Workload("random", sessions=6, prompt_words=10, max_tokens=5)
    results, seconds = measure(serve_bundled(), workload, load)
    assert [r.error for r in results] == [None] * 6
    for result in results:
        assert result.output_tokens == 5 and result.prompt_tokens > 10
        assert result.ttft is not None and 0 < result.ttft <= result.e2e <= seconds
        assert sum(result.gaps) <= result.e2e - result.ttft + 1e-9


def test_conversations_repeat_what_was_said(serve_bundled: Serve) -> None:
    workload = Workload("multi-turn", sessions=2, prompt_words=30, turns=3, max_tokens=4)
    results, _ = measure(serve_bundled(), workload, Load(concurrency=1))
    assert [r.error for r in results] == [None] * 6
    lengths = [r.prompt_tokens for r in results]
    assert lengths[0] < lengths[1] < lengths[2] and lengths[3] < lengths[4] < lengths[5]
    assert results[2].cached_tokens > 0


def test_an_error_is_counted_with_what_the_server_said(serve_bundled: Serve) -> None:
    workload = Workload(sessions=2, prompt_words=2000)
    results, seconds = measure(serve_bundled(), workload, Load(concurrency=2))
    report = summary(results, seconds)
    assert report["failed"] == 2 and report["ttft_seconds"]["p50"] is None
    assert "max_model_len" in next(iter(report["errors"]))


def test_the_command_writes_its_figures(
    serve_bundled: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, file = serve_bundled().url, tmp_path / "figures.json"
    shape = ["--sessions", "3", "--prompt-words", "5", "--max-tokens", "2", "--concurrency", "3"]
    base = ["hybrid-jax", "bench", "serve", "--url", url, *shape]
    for arguments, code, said in (
        (["--output", str(file), "--slo", "ttft=100"], 0, "goodput_requests_per_second"),
        (["--workload", "strange"], 2, "strange"),
        (["--slo", "ttft"], 2, "--slo"),
        (["--slo", "ttft=nan"], 2, "got 'ttft=nan'"),
        (["--slo", "e2e=0"], 2, "got 'e2e=0'"),
        (["--output", str(tmp_path / "none" / "a")], 2, "is no file in an existing directory"),
        (["--rate", "1"], 2, "either"),
        (["--url", "http://127.0.0.1:1"], 2, "lists no models"),
    ):
        monkeypatch.setattr("sys.argv", [*base, *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        assert (caught.value.code or 0) == code and said in captured.out + captured.err
    report = json.loads(file.read_text())
    assert report["requests"] == 3 and report["workload"]["prompt_words"] == 5
