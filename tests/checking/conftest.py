"""Tiny models, and references that they make of themselves: what a broken copy is held against."""

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.checking import RecordedPrompt, Reference
from hybrid_jax.checking.compare import compare
from hybrid_jax.checking.findings import Finding
from hybrid_jax.decoding import Workspace, generate
from hybrid_jax.loading import LoadedModel, load_config, load_model
from tests.helpers import tiny
from tests.helpers.real_engine import random_prompt

NUM_TOKENS = 8
LENGTHS = (5, 23)  # less and more than the window of 8
Found = dict[str, Finding]


def workspace(model: LoadedModel) -> Workspace:
    options = {"max_num_batched_tokens": 32, "token_buckets": (32,), "page_size": 4}
    return Workspace(model, max_num_seqs=1, max_model_len=32, num_checkpoints=2, **options)


def recorded(model: LoadedModel, space: Workspace) -> Reference:
    """The model's own numbers at every position."""
    layers = range(len(model.config.layers) + 1)
    prompts = []
    for length in LENGTHS:
        prompt = random_prompt(length, 0)
        with space.session() as session:
            hidden = session.hidden_states(prompt, layers)
            logits = session.next_logits
            params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
            tokens = generate(session, params)
        positions = np.arange(length, dtype=np.int32)
        ids = np.array(prompt, np.int32), np.array(tokens, np.int32)
        prompts.append(RecordedPrompt(*ids, logits, positions, hidden))
    return Reference(load_config(model.source)[1], "float32", "itself", tuple(prompts))


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple]:
    """`originals(name)`: a sound model in float32 and its reference."""
    known: dict[str, tuple[LoadedModel, Reference]] = {}

    def get(name: str) -> tuple[LoadedModel, Reference]:
        if name not in known:
            path = tiny.write_checkpoint(name, tmp_path_factory.mktemp("sound"), seed=0)
            model = load_model(path, dtype="float32")
            known[name] = model, recorded(model, workspace(model))
        return known[name]

    return get


def held_against(reference: Reference, model: LoadedModel) -> Found:
    findings, _ = compare(workspace(model), reference)
    return {finding.check: finding for finding in findings}


def scaled(model: LoadedModel, name: str, factor: float) -> LoadedModel:
    """The model with half of one parameter multiplied: a norm after it would undo a whole one."""
    array = np.array(model.params[name])
    array[..., : array.shape[-1] // 2] *= np.float32(factor)
    return replace(model, params={**model.params, name: jnp.asarray(array)})
