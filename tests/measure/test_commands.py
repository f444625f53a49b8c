"""`hybrid-jax bench`: figures as tables or JSON, and one sentence for a mistake."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_jax import measure
from hybrid_jax.measure.profile import PhaseProfile, ProfileLine
from pallas_kernels import bench
from serving import cli
from tests.helpers import tiny

Run = Callable[..., tuple[int, str, str]]
COMPILING = "2 at once: compiling, in a run that is not counted\n"
SHAPE = ("--batch", 2, "--max-num-batched-tokens", 8)  # two steps to compile, for all tests


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("bench", "latency")`: exit code, stdout and stderr of the command, in this process."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["hybrid-jax", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of all layer kinds."""
    return tiny.write_checkpoint("lara_mini-untied", tmp_path_factory.mktemp("model"), seed=0)


def test_latency(run: Run, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "latency.json"
    size = ("--prompt-tokens", 3, "--output-tokens", 4, "--rounds", 2)
    guesses = ("--num-speculative-tokens", 1)
    code, out, err = run("bench", "latency", model, *SHAPE, *size, *guesses, "--json", file)
    assert (code, err) == (0, COMPILING)
    for words in ("ttft", "tpot", "itl", "not counted", "lara_mini in float32"):
        assert words in out
    assert "gated_delta_rule: reference" in " ".join(out.split())
    report = json.loads(file.read_text())
    assert [r["batch"] for r in report["latency"]] == [2]
    assert {r["prompt_tokens"] for r in report["latency"]} == {3}
    assert report["engine"]["num_speculative_tokens"] == 1
    assert report["engine"]["max_model_len"] == 7 and report["engine"]["max_num_seqs"] == 2
    assert {"jax", "python", "hybrid_jax"} <= report["versions"].keys()
    assert report["machine"]["platform"] == "cpu" and report["machine"]["cores"] >= 1
    assert {kernel["op"] for kernel in report["kernels"]} >= {"paged_attention", "causal_conv1d"}


def test_throughput_and_its_plot(run: Run, model: Path, tmp_path: Path) -> None:
    plot = tmp_path / "throughput.png"
    size = ("--requests", 2, "--prompt-tokens", "2-4", "--output-tokens", "3")
    code, out, err = run("bench", "throughput", model, *SHAPE, *size, "--plot", plot, "--json", "-")
    assert (code, err) == (0, COMPILING)
    report = json.loads(out)  # nothing else is on stdout
    assert [r["output_tokens"] for r in report["throughput"]] == [6]
    assert all(4 <= r["prompt_tokens"] <= 8 for r in report["throughput"])
    for result in report["throughput"]:
        kinds = {name.split()[0]: peak for name, peak in result["peak_bytes"].items()}
        assert kinds.keys() == {"full", "window", "linear"} and min(kinds.values()) > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    code, out, err = run("bench", "throughput", model, *SHAPE, *size)
    assert code == 0 and "output tokens/s" in out and "linear" in out


def test_profile(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables, the JSON and the plot of a profile that is known; what it asked for."""
    asked: dict[str, object] = {}

    def known(path: Path, **options: object) -> tuple[PhaseProfile, ...]:
        asked.update(options, path=path)
        lines = (
            ProfileLine(0, "linear", "mixer", 0.003, 8.0, 10.0),
            ProfileLine(0, "linear", "ffn", 0.005, 8.0, 10.0),
            ProfileLine(None, "unattributed", "unattributed", 0.002, 0.0, 0.0),
        )
        phase = PhaseProfile("decode", 3, 2, 2, lines, 0.02, 0.01, 0.004, {"launch": 0.001})
        return (phase,)

    monkeypatch.setattr(measure, "measure_profile", known)
    plot, file = tmp_path / "layers.png", tmp_path / "profile.json"
    options = ("--rows", 2, "--prompt-tokens", 5, "--steps", 3, "--dtype", "float32")
    code, out, err = run("profile", model, *options, "--plot", plot, "--json", file)
    assert (code, err) == (0, "") and plot.read_bytes().startswith(b"\x89PNG")
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
    shares = {(row[1] or row[2]): row[3:7] for row in rows if len(row) == 9}
    assert shares == {
        "linear": ["8.000", "80.0%", "100.0%", "100.0%"],
        "ffn": ["5.000", "50.0%", "50.0%", "50.0%"],
        "mixer": ["3.000", "30.0%", "50.0%", "50.0%"],
        "unattributed": ["2.000", "20.0%", "0.0%", "0.0%"],
    }
    assert "gap to the next step 4.000 ms" in out and "host, launch 1.000 ms" in out
    assert asked == {
        "path": model,
        "rows": 2,
        "prompt_tokens": 5,
        "steps": 3,
        "dtype": "float32",
        "implementations": {},
    }
    report = json.loads(file.read_text())
    assert report["phases"][0]["op_seconds"] == pytest.approx(0.01)
    assert len(report["phases"][0]["lines"]) == 3 and "jax" in report["versions"]
    code, out, err = run("profile", model, "--plot", "x.doc")
    assert code == 2 and out == "" and "'x.doc' is no png" in err


def test_kernels(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    size = ("--case", "tiny", "--tokens", 3, "--rounds", 2)
    code, out, err = run("bench", "kernels", "rows", *size, "--json", file)
    assert (code, err) == (0, "") and "rows" in out and "reference (chosen)" in out
    timings = json.loads(file.read_text())["timings"]
    (timing,) = [t for t in timings if t["implementation"] == "reference"]  # others are refused
    low, high = timing["range"]
    assert 0 < low <= timing["median"] <= high and len(timing["seconds"]) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["rows", "frob", "--case", "tiny"], "unknown op 'frob'; known: causal_conv1d, "),
        (["rows", "gla", "--case", "tiny_bits"], "gla has no case 'tiny_bits'; known: "),
    ],
)
def test_all_that_is_wrong_is_found_before_the_first_kernel_runs(
    options: list[str], words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[tuple[str, *tuple[object, ...]]] = []
    monkeypatch.setattr(bench, "_time_case", lambda *what: timed.append(what) or [])
    code, out, err = run("bench", "kernels", *options)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1
    assert not timed
    run("bench", "kernels", "rows", "gla", "--case", "tiny")
    assert {what[0] for what in timed} == {"rows", "gla"}


MISTAKES = {
    "no batch": (["latency", "--batch", 0], "batch must be at least 1, got 0"),
    "no rounds": (["latency", "--rounds", 0], "rounds must be at least 1"),
    "longer than the model": (["latency", "--prompt-tokens", 99999], "max_model_len"),
    "no range": (["throughput", "--prompt-tokens", "few"], "got 'few'; use 32-128"),
    "backwards": (["throughput", "--output-tokens", "9-3"], "got 9 to 3"),
    "many guesses": (["throughput", "--num-speculative-tokens", 65], "got 65"),
    "no figure": (["throughput", "--plot", "a.doc"], "'a.doc' is no png"),
    "no directory": (["kernels", "rows", "--json", "none/a"], "--json 'none/a' is no file in an"),
    "a directory": (["latency", "--json", "."], "--json '.' is no file"),
    "too much": (["kernels", "--rows", 10**9], "with 1,000,000,000 rows of 1,025 tokens takes"),
    "far too much": (["kernels", "gla", "--tokens", 10**12], "tokens must be at most 1073741824"),
    "no such kernel": (["kernels", "frob"], "unknown op 'frob'"),
    "no such case": (["kernels", "rows", "--case", "frob"], "rows has no case 'frob'"),
    "no such op": (["latency", "--implementation", "frob=x"], "unknown op 'frob'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(name: str, run: Run, model: Path) -> None:
    (command, *options), words = MISTAKES[name]
    arguments = options if command == "kernels" else [model, *options]
    code, out, err = run("bench", command, *arguments)
    assert code == 2 and out == "" and words in err, err
    assert err.startswith("hybrid-jax: ") and err.count("\n") == 1


@pytest.mark.parametrize("group", ["bench", "check"])
def test_a_group_of_commands_alone_shows_its_help(group: str, run: Run) -> None:
    code, out, err = run(group)
    assert (code, err) == (2, "") and f"hybrid-jax {group} [OPTIONS]" in out
