"""The drift check: what it must find, what it must not, and whom it refuses."""

from pathlib import Path

import numpy as np
import pytest

from hybrid_jax.checking.drift import _report, measure_drift
from hybrid_jax.loading import LoadedModel, load_model
from tests.helpers import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tiny.write_checkpoint("lara_mini-untied", tmp_path_factory.mktemp("m"), seed=0)
    return load_model(directory)


def test_states_drift_from_the_second_token_on(model: LoadedModel) -> None:
    """The first token reads no state; from then on rounding shows, and stays small."""
    report = measure_drift(model, 300)
    assert [(row.start, row.end) for row in report.rows] == [
        (1, 64), (65, 128), (129, 256), (257, 300),
    ]  # fmt: skip
    for row in report.rows:
        assert row.max_difference >= row.mean_difference > 0
        assert row.kl_divergence >= 0
    # Rounding to 8 bits: thousandths of what the logits vary by, not tenths.
    assert 0 < report.worst < 0.05
    (first,) = measure_drift(model, 1).rows
    assert first.max_difference == first.kl_divergence == 0.0 and first.agreement == 1.0
    assert measure_drift(model, 300) == report
    assert measure_drift(model, 300, seed=1) != report


def test_a_report_finds_the_first_difference() -> None:
    found = np.zeros((200, 5), np.float32)
    found[:, 2:] = [2.0, 0.0, 1.0]  # deviation, KL, same
    found[150] = [3.0, 0.5, 2.0, 0.1, 0.0]
    report = _report(found)
    assert report.first_difference == 151
    assert [row.max_difference for row in report.rows] == [0.0, 0.0, 3.0]
    assert report.rows[2].agreement == pytest.approx(71 / 72)
    assert report.worst == report.rows[2].relative == pytest.approx(0.5 / 72 / 2)
    assert _report(found[:150]).first_difference is None


def test_it_refuses_what_makes_no_sense(model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokens 1025 must be between 1 and the model's 1024"):
        measure_drift(model, 1025)
    gemma = load_model(tiny.write_checkpoint("gemma3", tmp_path, seed=0))
    with pytest.raises(ValueError, match="gemma3_text has no linear-attention layers"):
        measure_drift(gemma)
