"""Beam search, guidance and typical sampling against transformers: needs torch.

The seed changes from run to run; a failure names it, and HYBRID_JAX_TEST_SEED repeats it.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.decoding import Guided, Workspace, beam_search, generate, typical
from hybrid_jax.loading import load_model
from hybrid_jax.runtime.sampling import LogitsContext
from tests.decoding.conftest import OPTIONS
from tests.helpers import tiny
from tests.helpers.real_engine import random_prompt

torch = pytest.importorskip("torch", reason="compares with transformers, which needs torch")
from transformers import AutoModelForCausalLM, TypicalLogitsWarper  # noqa: E402

FIRST_SEED = int(os.environ.get("HYBRID_JAX_TEST_SEED") or int.from_bytes(os.urandom(3)))
NEW = 10
SCORE_TOLERANCE = 1e-4  # a mean of log probabilities of float32 logits

# Deprecations inside transformers and torch are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")


def hf_generate(model: Any, prompt: tuple[int, ...], **options: Any) -> Any:
    ids = torch.tensor([prompt])
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )


def beams(model: Any, prompt: tuple[int, ...], **options: Any) -> list[tuple[list[int], float]]:
    """Hypotheses without padding, and their scores."""
    out = hf_generate(model, prompt, num_beams=4, num_return_sequences=4, **options)
    stop, found = options.get("eos_token_id"), []
    for row, score in zip(out.sequences, out.sequences_scores, strict=True):
        tokens = row[len(prompt) :].tolist()
        if stop in tokens:
            tokens = tokens[: tokens.index(stop) + 1]
        found.append((tokens, float(score)))
    return found


# Gated delta nets with full attention, and windows with soft caps; without experts, whose choice is
# discrete.
@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_beam_search_and_guidance(name: str, tmp_path: Path) -> None:
    """Tokens and scores, ended by length or by a stop token, for several settings.

    A choice that is too close to call in float32 says nothing: a seed counts if transformers
    itself finds the same tokens in float64.
    """
    torch.set_num_threads(1)
    settings: list[dict[str, Any]] = [
        {},
        {"length_penalty": 2.0},
        {"length_penalty": -0.5},
        {"early_stopping": True},
    ]
    for seed in itertools.count(FIRST_SEED):
        tiny.write_checkpoint(name, tmp_path, seed)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
        prompt = random_prompt(11, seed)
        stop = beams(model, prompt)[0][0][3]
        runs = [({}, None)] + [(options, stop) for options in settings]
        wanted = [beams(model, prompt, **o, eos_token_id=s) for o, s in runs]
        sure = [beams(exact, prompt, **o, eos_token_id=s) for o, s in runs]
        guided = {"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([prompt[-3:]])}
        tokens, exactly = (
            hf_generate(m, prompt, **guided).sequences[0, len(prompt) :].tolist()
            for m in (model, exact)
        )
        if [[t for t, _ in w] for w in wanted] == [[t for t, _ in w] for w in sure]:
            break
    where = f"HYBRID_JAX_TEST_SEED={seed}"
    assert tokens == exactly, where
    space = Workspace(load_model(tmp_path, dtype="float32"), **OPTIONS)
    session, other = space.session(), space.session()
    session.prefill(prompt)
    for (options, end), hypotheses in zip(runs, wanted, strict=True):
        stop_ids = [] if end is None else [end]
        found = beam_search(session, num_beams=4, max_tokens=NEW, stop_ids=stop_ids, **options)
        assert [h.token_ids for h in found] == [t for t, _ in hypotheses], f"{options} {where}"
        for hypothesis, (_, score) in zip(found, hypotheses, strict=True):
            assert abs(hypothesis.score - score) < SCORE_TOLERANCE, f"{options} {where}"
    assert len({len(t) for w in wanted for t, _ in w}) > 1, where  # some ended early
    other.prefill(prompt[-3:])
    params = SamplingParams(temperature=0.0, max_tokens=NEW)
    assert generate(Guided(session, other, scale=2.0), params) == tokens, where


@pytest.mark.parametrize("mass", [0.05, 0.5, 0.9, 0.999])
def test_typical_sampling(mass: float) -> None:
    rng = np.random.default_rng(FIRST_SEED)
    logits = rng.normal(scale=3.0, size=(20, 50)).astype(np.float32)
    wanted = TypicalLogitsWarper(mass)(None, torch.tensor(logits)).numpy()  # type: ignore[arg-type]
    nothing = jnp.zeros((20, 1), jnp.int32)
    found = typical(mass)(jnp.asarray(logits), LogitsContext(nothing, nothing[0], nothing[0]))
    assert np.array_equal(np.asarray(found), wanted), f"HYBRID_JAX_TEST_SEED={FIRST_SEED}"


def test_typical_sampling_refuses_a_mass() -> None:
    with pytest.raises(ValueError, match="mass must be .* got 0"):
        typical(0.0)
