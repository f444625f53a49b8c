"""A model that is broken on purpose, against the reference of the sound one."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_jax.checking.compare import compare_configs, tokens_finding
from hybrid_jax.errors import ReferenceFileError
from hybrid_jax.loading import LoadedModel, load_model
from tests.checking.conftest import Found, held_against, scaled
from tests.helpers import tiny

SLIDING_FULL, HYBRID = "gemma3", "qwen3_5"  # five windows, one full; three linear, one full
Config = dict[str, Any]


def with_config(name: str, directory: Path, change: Callable[[Config], None]) -> LoadedModel:
    """The sound weights under another config.json."""
    path = tiny.write_checkpoint(name, directory, seed=0)
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return load_model(path, dtype="float32")


def verdicts(found: Found) -> dict[str, str]:
    return {name: finding.verdict for name, finding in found.items()}


ALL = {"hidden states", "prefill logits", "greedy tokens"}


@pytest.mark.parametrize("name", [SLIDING_FULL, HYBRID])
def test_the_sound_model_passes(name: str, originals: Callable[[str], Any]) -> None:
    model, reference = originals(name)
    found = held_against(reference, model)
    assert verdicts(found) == dict.fromkeys(ALL, "pass")
    # The same steps on the same machine: nothing but an equal sum in another order.
    assert found["hidden states"].figure < 1e-6


WEIGHTS = [
    # A percent, far above float32's rounding, in layers of every kind.
    (SLIDING_FULL, "layers.2.ffn.down_proj.weight", 1.01, "layer 2 (window", "weights, norms"),
    (SLIDING_FULL, "layers.5.mixer.v_proj.weight", 1.01, "layer 5 (full", "weights, norms"),
    (SLIDING_FULL, "layers.5.mixer.k_norm.weight", 0.5, "layer 5 (full", "rope, scale, q/k norms"),
    (HYBRID, "layers.1.mixer.A_log", 1.5, "layer 1 (linear", "convolution, decay and state"),
    (HYBRID, "layers.0.ffn.up_proj.weight", 1.01, "layer 0 (linear", "weights, norms"),
    (HYBRID, "embed_tokens.weight", 1.01, "the embedding", "its scale"),
]


@pytest.mark.parametrize("name, parameter, factor, layer, suspects", WEIGHTS)
def test_a_wrong_weight_is_found_in_its_layer(
    name: str,
    parameter: str,
    factor: float,
    layer: str,
    suspects: str,
    originals: Callable[[str], Any],
) -> None:
    model, reference = originals(name)
    finding = held_against(reference, scaled(model, parameter, factor))["hidden states"]
    assert finding.verdict == "fail" and finding.figure > finding.bound
    assert f"{layer}" in finding.detail and "first to diverge" in finding.detail
    assert suspects in finding.detail


def test_what_follows_the_layers_is_found_in_the_logits(originals: Callable[[str], Any]) -> None:
    model, reference = originals(HYBRID)
    found = held_against(reference, scaled(model, "norm.weight", 1.1))
    assert found["hidden states"].verdict == "pass"
    assert found["prefill logits"].verdict == "fail"
    assert "final norm, the head" in found["prefill logits"].detail


def test_nan_is_no_agreement(originals: Callable[[str], Any]) -> None:
    model, reference = originals(HYBRID)
    found = held_against(reference, scaled(model, "layers.2.mixer.out_proj.weight", np.nan))
    assert verdicts(found) == dict.fromkeys(ALL, "fail")
    assert "layer 2 (linear" in found["hidden states"].detail


def narrower(config: Config) -> None:
    config["sliding_window"] = 6


def wider(config: Config) -> None:
    config["sliding_window"] = 12


def other_theta(config: Config) -> None:
    config["rope_parameters"]["full_attention"]["rope_theta"] = 500.0


@pytest.mark.parametrize(
    "change, field, layer, suspects",
    [
        (narrower, "sliding_window 8 -> 6", "layer 0 (window", "from position 6 on, where the"),
        pytest.param(
            *(wider, "sliding_window 8 -> 12", "layer 0 (window", "from position 8 on"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(other_theta, "rope_parameters", "layer 5 (full", "look at rope"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_setting_is_found_in_its_layer(
    change: Callable[[Config], None],
    field: str,
    layer: str,
    suspects: str,
    originals: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    _, reference = originals(SLIDING_FULL)
    model = with_config(SLIDING_FULL, tmp_path, change)
    finding = held_against(reference, model)["hidden states"]
    assert finding.verdict == "fail"
    assert layer in finding.detail and suspects in finding.detail
    settings = compare_configs(model.source, reference)
    assert (settings.verdict, settings.figure) == ("warn", 1) and field in settings.detail


def test_a_token_passes_by_a_tie_and_not_beyond(originals: Callable[[str], Any]) -> None:
    """The runner-up instead of the best: right only if the two are as good as equal."""
    model, reference = originals(HYBRID)
    first = reference.prompts[0]
    runner_up = np.argsort(first.logits)[-2]
    gap = (first.logits.max() - first.logits[runner_up]) / first.logits.std()
    forced = replace(first, tokens=np.array([runner_up], np.int32))
    finding = held_against(replace(reference, prompts=(forced,)), model)["greedy tokens"]
    assert finding.verdict == "fail" and "0 of 1 tokens" in finding.detail
    assert finding.figure == pytest.approx(gap, rel=1e-3)


def test_ties_are_counted_apart() -> None:
    """Gaps at the margin pass, those beyond it and NaN do not."""
    finding = tokens_finding("greedy", [0.0, 0.5, 1.0], 1.0)
    assert (finding.verdict, finding.figure) == ("pass", 1.0)
    assert "3 of 3 tokens" in finding.detail and "2 of them by a tie" in finding.detail
    finding = tokens_finding("greedy", [0.0, 0.5, 1.01], 1.0)
    assert finding.verdict == "fail" and "2 of 3 tokens" in finding.detail
    assert tokens_finding("greedy", [0.0, math.nan, 0.0], 1.0).verdict == "fail"


def test_a_reference_of_another_shape_is_refused(originals: Callable[[str], Any]) -> None:
    model, _ = originals(HYBRID)
    _, other = originals(SLIDING_FULL)
    with pytest.raises(ReferenceFileError, match="6 layers, hidden size 64 and 128 words; this"):
        held_against(other, model)
