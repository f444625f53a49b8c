"""Parity with transformers on weights that nobody has seen: needs torch and a new transformers.

The seed changes from run to run; a failure names it, and HYBRID_JAX_TEST_SEED repeats it.
"""

import importlib
import os
from pathlib import Path

import numpy as np
import pytest

from hybrid_jax.generate import dense_logits, generate
from hybrid_jax.loading import load_model
from tests.helpers import tiny

pytest.importorskip("torch", reason="compares with transformers, which needs torch")
from tests.models import record_reference

LOGIT_TOLERANCE = 2e-4  # as in test_hf_reference.py
FIRST_SEED = int(os.environ.get("HYBRID_JAX_TEST_SEED") or int.from_bytes(os.urandom(3)))

# Deprecations inside transformers and torch are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pads every sequence to the longest, so that each function compiles once per checkpoint."""
    monkeypatch.setattr(importlib.import_module("hybrid_jax.generate"), "PAD_TO", 128)


@pytest.mark.parametrize("name", tiny.TINY)
def test_logits_and_greedy_tokens(name: str, tmp_path: Path) -> None:
    """Every prefill logit and 64 greedy tokens of three prompts."""
    seed, runs = record_reference.decisive_run(name, tmp_path, FIRST_SEED)
    loaded = load_model(tmp_path, dtype="float32")
    for run in runs:
        where = f"{name}, HYBRID_JAX_TEST_SEED={seed}, prompt of {len(run.prompt)} tokens"
        prompt = run.prompt.tolist()
        error = np.abs(np.asarray(dense_logits(loaded, prompt)) - run.logits).max()
        assert error <= LOGIT_TOLERANCE * run.logits.std(), where
        assert list(generate(loaded, prompt, max_tokens=len(run.tokens))) == run.tokens.tolist(), (
            where
        )
