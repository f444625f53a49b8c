"""Parity with transformers, from committed outputs: runs without torch (record_reference.py)."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_jax.generate import dense_logits, generate
from hybrid_jax.loading import load_model
from tests.helpers import tiny

REFERENCE = Path(__file__).parent / "reference"
# Of the standard deviation of the logits. Both sides compute in float32 but sum in other orders;
# transformers' own prefill and decode differ by a tenth of this.
LOGIT_TOLERANCE = 2e-4


@dataclass(frozen=True)
class Case:
    """A loaded tiny checkpoint and what transformers made of it."""

    loaded: Any
    expected: dict[str, np.ndarray]

    @property
    def prompts(self) -> Iterator[tuple[int, list[int]]]:
        """Index and token ids of each recorded prompt."""
        for i in range(sum(key.startswith("prompt_") for key in self.expected)):
            yield i, self.expected[f"prompt_{i}"].tolist()


@pytest.fixture(scope="module", params=list(tiny.TINY))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One checkpoint, written to two shards from its seed and loaded in float32."""
    name = request.param
    with np.load(REFERENCE / f"{name}.npz") as file:
        expected = dict(file)
    directory = tmp_path_factory.mktemp(name)
    tiny.write_checkpoint(name, directory, int(expected["seed"]), shards=2)
    return Case(load_model(directory, dtype="float32"), expected)


@pytest.fixture(autouse=True)
def one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pads every sequence to the longest, so that each function compiles once per checkpoint."""
    monkeypatch.setattr(importlib.import_module("hybrid_jax.generate"), "PAD_TO", 128)


def test_prefill_logits(case: Case) -> None:
    """Logits at the recorded positions of every prompt."""
    for i, prompt in case.prompts:
        expected = case.expected[f"logits_{i}"]
        logits = np.asarray(dense_logits(case.loaded, prompt))
        assert logits.shape == (len(prompt), tiny.VOCAB_SIZE)
        error = np.abs(logits[case.expected[f"positions_{i}"]] - expected).max() / expected.std()
        assert error <= LOGIT_TOLERANCE, f"prompt of {len(prompt)} tokens"


def test_greedy_tokens(case: Case) -> None:
    """The greedy continuation of every prompt, token by token."""
    for i, prompt in case.prompts:
        expected = case.expected[f"tokens_{i}"].tolist()
        assert list(generate(case.loaded, prompt, max_tokens=len(expected))) == expected


def test_every_reference_belongs_to_a_checkpoint() -> None:
    """No stale file, none missing."""
    assert {path.stem for path in REFERENCE.glob("*.npz")} == set(tiny.TINY)
