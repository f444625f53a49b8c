"""References of transformers itself: needs torch.

The seed of models without linear layers changes from run to run; a failure names it, and
HYBRID_JAX_TEST_SEED repeats it.
"""

import logging
import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from hybrid_jax.checking import Reference, record_reference
from hybrid_jax.checking.compare import compare
from hybrid_jax.decoding import Workspace
from hybrid_jax.errors import InvalidRequest, ModelError
from hybrid_jax.loading import load_model
from tests.checking.conftest import scaled
from tests.helpers import tiny

torch = pytest.importorskip("torch", reason="records with transformers, which needs torch")

# Linear layers: not a fresh seed. At position 0 their output is (q . k) v per head; where random q
# and k are nearly orthogonal, the sum cancels, and the norm after it makes its rounding large.
# Of 245 seeds 3 are beyond the bound for this, one by 15 times; there transformers in float32 is
# 200 times as far from itself in float64 as elsewhere. tests/models/test_hf_live.py skips such
# seeds.
FIXED_SEED = 1
SEED = int(os.environ.get("HYBRID_JAX_TEST_SEED") or random.randrange(2**31))

# Deprecations inside transformers and torch are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")


# Without experts, whose choice is discrete: any seed will do.
# The names are the same in every worker, the seeds are not.
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param("qwen3_5", FIXED_SEED, id="qwen3_5"),
        pytest.param("gemma3", SEED, id="gemma3", marks=pytest.mark.slow),
    ],
)
def test_a_sound_model_agrees_and_a_broken_one_does_not(
    name: str, seed: int, tmp_path: Path
) -> None:
    """Recorded, saved, read again and compared, layer by layer."""
    torch.set_num_threads(1)  # products this small take ten times as long on two threads
    where = f"HYBRID_JAX_TEST_SEED={seed}"
    model = load_model(tiny.write_checkpoint(name, tmp_path, seed), dtype="float32")
    record_reference(tmp_path, num_tokens=6).save(tmp_path / "reference")
    reference = Reference.load(tmp_path / "reference")
    longest = max(len(recorded.prompt) for recorded in reference.prompts)
    assert longest >= model.config.widest_window + 64
    assert "transformers" in reference.made_by and reference.dtype == "float32"
    options: dict[str, Any] = {
        "max_num_seqs": 1,
        "max_model_len": 128,
        "max_num_batched_tokens": 128,
    }
    options |= {"max_num_batched_tokens": 128, "token_buckets": (128,)}
    findings, layers = compare(Workspace(model, **options), reference)
    assert [finding.verdict for finding in findings] == ["pass"] * 3, f"{findings} {where}"
    assert len(layers) == len(model.config.layers) + 1
    last = len(model.config.layers) - 1
    wrong = scaled(model, f"layers.{last}.ffn.down_proj.weight", 1.01)
    (hidden, *_), _ = compare(Workspace(wrong, **options), reference)
    assert hidden.verdict == "fail" and f"layer {last} (full" in hidden.detail, where


def test_transformers_says_nothing_and_goes_on_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model with linear layers it has much to say."""
    import transformers

    path = tiny.write_checkpoint("qwen3_5", tmp_path, SEED)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger, log = logging.getLogger("transformers"), transformers.utils.logging
    before = log.get_verbosity(), log.is_progress_bar_enabled()
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            record_reference(path, num_tokens=2)
    finally:
        logger.removeHandler(handler)
    assert [r.getMessage() for r in records] == [] == [str(w.message) for w in caught]
    assert capsys.readouterr() == ("", "")
    assert (log.get_verbosity(), log.is_progress_bar_enabled()) == before


def test_what_cannot_be_recorded(tmp_path: Path) -> None:
    path = tiny.write_checkpoint("qwen3", tmp_path, SEED)
    with pytest.raises(InvalidRequest, match="has no tokenizer for prompts of text"):
        record_reference(path, prompts=["to be"])
    with pytest.raises(ValueError, match="num_tokens must be at least 1, got 0"):
        record_reference(path, num_tokens=0)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="no weights for model.layers.1.mlp.up_proj.weight"):
        record_reference(path)
