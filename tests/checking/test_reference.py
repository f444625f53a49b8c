"""Files of references: what is read back, and what is refused before anything is computed."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_jax.checking import RecordedPrompt, Reference, check, check_model
from hybrid_jax.errors import ReferenceFileError
from tests.helpers import tiny

SEED = int(os.environ.get("HYBRID_JAX_TEST_SEED") or int.from_bytes(os.urandom(3)))
LAYERS, HIDDEN, VOCAB = 3, 8, 16


def prompt_of(length: int, num_tokens: int = 4) -> RecordedPrompt:
    rng = np.random.default_rng(SEED)
    ids = rng.integers(VOCAB, size=length, dtype=np.int32)
    tokens = rng.integers(VOCAB, size=num_tokens, dtype=np.int32)
    positions = np.arange(length, dtype=np.int32)
    hidden = rng.standard_normal((LAYERS + 1, length, HIDDEN), np.float32)
    return RecordedPrompt(ids, tokens, rng.standard_normal(VOCAB, np.float32), positions, hidden)


def reference_of(**changes: Any) -> Reference:
    prompts = (prompt_of(5), replace(prompt_of(3), **changes))
    return Reference({"model_type": "any"}, "float32", "itself", prompts)


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    saved = reference_of()
    saved.save(tmp_path / "reference")
    read = Reference.load(tmp_path / "reference")
    assert (read.config, read.dtype, read.made_by) == (saved.config, "float32", "itself")
    for ours, theirs in zip(read.prompts, saved.prompts, strict=True):
        for name, array in vars(theirs).items():
            np.testing.assert_array_equal(getattr(ours, name), array)


DAMAGE: dict[str, dict[str, Any]] = {
    "no prompt": {"prompt": np.zeros(0, np.int32)},
    "no tokens": {"tokens": np.zeros(0, np.int32)},
    "prompt of floats": {"prompt": np.zeros(3, np.float32)},
    "prompt of two dimensions": {"prompt": np.zeros((1, 3), np.int32)},
    "word that is not there": {"prompt": np.array([1, 2, VOCAB], np.int32)},
    "token that is not there": {"tokens": np.array([VOCAB], np.int32)},
    "negative token": {"tokens": np.array([-1], np.int32)},
    "position after the end": {"positions": np.array([0, 1, 3], np.int32)},
    "negative position": {"positions": np.array([-1, 0, 1], np.int32)},
    "fewer positions than hidden states": {"positions": np.array([0, 1], np.int32)},
    "logits without a dimension": {"logits": np.array(1.0, np.float32)},
    "hidden states of two dimensions": {"hidden": np.zeros((LAYERS + 1, HIDDEN), np.float32)},
    "hidden states of integers": {"hidden": np.zeros((LAYERS + 1, 3, HIDDEN), np.int32)},
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_arrays(name: str, tmp_path: Path) -> None:
    reference_of(**DAMAGE[name]).save(tmp_path / "reference")
    with pytest.raises(ReferenceFileError, match=r"damaged reference .*of prompt 1.*again"):
        Reference.load(tmp_path / "reference")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"prompts": ()}, "no prompts"),
        ({"dtype": "int4"}, "dtype 'int4' is not supported"),
    ],
)
def test_damaged_metadata(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    replace(reference_of(), **changes).save(tmp_path / "reference")
    with pytest.raises(ReferenceFileError, match=words):
        Reference.load(tmp_path / "reference")


def test_a_config_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", lambda config: "[]")
    reference_of().save(tmp_path / "reference")
    with pytest.raises(ReferenceFileError, match="no config"):
        Reference.load(tmp_path / "reference")


def test_all_that_was_recorded_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a prompt that only the comparison feeds, with more tokens than texts shall have."""
    prompts = (*(prompt_of(3) for _ in range(8)), prompt_of(700, num_tokens=20))
    reference = replace(reference_of(), prompts=prompts)
    asked: dict[str, Any] = {}

    class Made(Exception):
        pass

    def subject(model: object, **options: Any) -> None:
        asked.update(options)
        raise Made

    monkeypatch.setattr(check, "Subject", subject)
    with pytest.raises(Made):
        check_model(tiny.write_checkpoint("qwen3", tmp_path, seed=0), reference, num_tokens=2)
    assert asked["max_model_len"] == 720
