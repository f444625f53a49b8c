"""lm-evaluation-harness on a task of two questions from a local file, on the bundled model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_jax.bundled import bundled_model
from hybrid_jax.generate import dense_logits, generate
from hybrid_jax.loading import load_model
from hybrid_jax.tokenizer import load_tokenizer

# What the harness and its dependencies warn of is not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 1e-2  # sums of some twenty log probabilities of float32 logits
QUESTIONS = (
    ("In the beginning God created the heaven and the", ["earth", "zebra"]),
    ("And God said, Let there be", ["purple soup", "light: and there was light"]),
)


def test_without_the_harness() -> None:
    """One sentence says what to install."""
    program = "import sys; sys.modules['lm_eval'] = None; import hybrid_jax.decoding.lm_eval"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stderr.splitlines()[-1] == (
        "ImportError: hybrid_jax.decoding.lm_eval needs lm-evaluation-harness; pip install "
        "'hybrid-jax[lm-eval]'"
    )


def tasks(directory: Path) -> list[dict[str, Any]]:
    """One task for each kind of request."""
    path = directory / "questions.jsonl"
    lines = [json.dumps({"q": q, "choices": c, "label": i}) for i, (q, c) in enumerate(QUESTIONS)]
    path.write_text("\n".join(lines))
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    choice = common | {
        "task": "choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    }
    rolling = common | {
        "task": "rolling",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{q}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    until = common | {
        "task": "until",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["n", ","], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    }
    return [choice, rolling, until]


@pytest.mark.slow
def test_a_local_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of request, each against the oracle."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness")
    from hybrid_jax.decoding.lm_eval import HybridLM

    lm = HybridLM(
        bundled_model(), dtype="float32", max_num_seqs=2, max_model_len=32,
        max_num_batched_tokens=32, row_buckets=(2,), token_buckets=(32,),
    )  # fmt: skip
    result = lm_eval.simple_evaluate(lm, tasks=tasks(tmp_path), bootstrap_iters=0, log_samples=True)
    samples = {task: [s["resps"] for s in found] for task, found in result["samples"].items()}

    model = load_model(bundled_model(), dtype="float32")
    tokenizer = load_tokenizer(bundled_model())
    assert tokenizer is not None

    def logprob(start: int, ids: list[int]) -> float:
        logits = np.asarray(dense_logits(model, ids)).astype(np.float64)
        logits -= np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        return sum(logits[i - 1, ids[i]] for i in range(start, len(ids)))

    for i, (question, choices) in enumerate(QUESTIONS):
        for found, answer in zip(samples["choice"][i], choices, strict=True):
            ids = tokenizer.encode(f"{question} {answer}")
            wanted = logprob(len(tokenizer.encode(question)), ids)
            assert abs(found[0][0] - wanted) < TOLERANCE
        continuation = tokenizer.decode(generate(model, tokenizer.encode(question), 8))
        ends = [continuation.index(stop) for stop in "n," if stop in continuation]
        assert samples["until"][i] == [[continuation[: min(ends, default=None)]]]
        ids = tokenizer.encode(question)  # with a token for the beginning
        assert abs(samples["rolling"][i][0][0] - logprob(1, ids)) < TOLERANCE
    assert result["results"]["choice"]["acc,none"] == 1.0
