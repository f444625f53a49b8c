"""`hybrid-jax check`: what it finds, and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hybrid_jax import checking
from hybrid_jax.checking import CheckReport, Finding, LayerError
from hybrid_jax.loading import load_model
from tests.checking.conftest import recorded, workspace
from tests.helpers import tiny
from tests.unit.conftest import Run, change_tensors, is_one_sentence


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of all layer kinds, without a tokenizer."""
    return tiny.write_checkpoint("lara_mini-untied", tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A checkpoint for a test to break."""
    return tiny.write_checkpoint("lara_mini-untied", tmp_path / "broken", seed=0)


CHECK = ("--tokens", 6, "--long", 270)


@pytest.mark.slow
def test_check_ends_with_1_when_a_model_is_not_its_reference(
    run: Run, model: Path, broken: Path, tmp_path: Path
) -> None:
    """The table of a sound model, and JSON of one with a wrong weight in its second layer."""
    loaded, file = load_model(model), tmp_path / "reference.safetensors"
    recorded(loaded, workspace(loaded)).save(file)
    code, out, err = run("check", model, "--reference", file, *CHECK)
    assert (code, err) == (0, ""), out
    assert "against itself in float32" in out and "fail" not in out
    for name in ("hidden states", "isolation", "repetition", "long prompt", "seed"):
        assert name in out

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.linear_attn.A_log"] *= 2

    change_tensors(broken, spoil)
    code, out, err = run("check", "--json", "--reference", file, broken, *CHECK)
    report = json.loads(out)
    assert (code, err) == (1, "") and report["failed"]
    detail = {f["check"]: f["detail"] for f in report["findings"]}["hidden states"]
    assert "layer 1 (linear: " in detail and "first to diverge" in detail
    assert "convolution, decay" in detail
    failed = {f["check"] for f in report["findings"] if f["verdict"] == "fail"}
    # It is sound in itself: only the reference tells.
    assert {"hidden states", "prefill logits"} <= failed
    assert not failed - {"hidden states", "prefill logits", "greedy tokens", "repetition"}
    assert [layer["position"] is None for layer in report["layers"]] == [True, True, False, False]


def test_the_tables_of_a_wrong_layer(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = LayerError(0, 0.0, 1e-5, None), LayerError(1, 0.25, 1e-5, 17)
    found = Finding("hidden states", "fail", 0.25, 1e-5, "look at layer 0")
    report = CheckReport((found,), layers, "float32")
    monkeypatch.setattr(checking, "check_model", lambda *_, **__: report)
    code, out, err = run("check", "run", model)
    assert (code, err) == (1, "")
    assert "look at layer 0" in out
    assert "first wrong position" in out and "17" in out


CHECK_MISTAKES = {
    "no reference": (["--reference", "{}/none"], ["none' cannot be read", "record-reference"]),
    "no safetensors": (["--reference", "{}/config.json"], ["config.json' cannot be read as a ref"]),
    "weights": (["--reference", "{}/model.safetensors"], ["no reference of version 1", "record"]),
    "tokens": (["--tokens", "-1"], ["num_tokens must be at least 0, got -1", "use 0"]),
    "no room": (["--tokens", "2000"], ["num_tokens 2000 leave no room", "1024 positions", "fewer"]),
    "long": (["--long", "5000"], ["is more than the model's positions", "at most 1024"]),
    "option": (["--frob"], ["No such option", "--frob"]),
    "implementation": (["--implementation", "frob"], ["must be op=name, got 'frob'"]),
}


@pytest.mark.parametrize("name", CHECK_MISTAKES)
def test_a_mistake_of_check_is_one_sentence(name: str, run: Run, model: Path) -> None:
    options, words = CHECK_MISTAKES[name]
    code, out, err = run("check", model, *[option.format(model) for option in options])
    assert code == 2 and out == "" and is_one_sentence(err), err
    assert all(word in err for word in words), err


def test_recording_without_torch_says_what_to_do(model: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None\nfrom serving.cli import main; main()"
    target = tmp_path / "reference"
    command = [sys.executable, "-c", code, "check", "record-reference", str(model), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == "" and not target.exists()
    assert is_one_sentence(done.stderr)
    assert "torch is not installed" in done.stderr and "pip install torch" in done.stderr
