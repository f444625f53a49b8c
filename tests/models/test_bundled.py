"""The bundled model recalls numbers, whoever shares its batch; transformers reads it too."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hybrid_jax import LLM, SamplingParams, load_model
from hybrid_jax.bundled import bundled_model
from hybrid_jax.generate import dense_logits
from training.recall import make_prompt

PROMPTS = 48
# What its README reports, less three standard deviations of a sample of PROMPTS.
LEAST_ACCURACY = 0.9
MAX_BYTES = 12 * 2**20
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Eight rows, and fewer pages than eight prompts need: some are preempted on the way."""
    options = {"max_num_seqs": 8, "max_model_len": 256, "num_pages": 40, "page_size": 16}
    buckets = {"row_buckets": (8,), "token_buckets": (64,), "max_num_batched_tokens": 64}
    with LLM(bundled_model(), dtype="float32", **options, **buckets) as llm:
        yield llm


def recall_prompts(seed: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    return [make_prompt(rng, num_keys=1 + i % 3, filler_words=40 + i) for i in range(PROMPTS)]


def test_recall_is_exact_and_independent_of_batch_mates(llm: LLM) -> None:
    pairs = recall_prompts(seed=1)
    prompts = [prompt for prompt, _ in pairs]
    batched = [o.outputs[0].text for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert llm.stats().preemptions > 0
    shuffled = list(range(PROMPTS))
    random.Random(2).shuffle(shuffled)
    again = llm.generate([prompts[i] for i in shuffled], GREEDY, use_tqdm=False)
    assert [again[shuffled.index(i)].outputs[0].text for i in range(PROMPTS)] == batched
    for i in range(0, PROMPTS, 12):
        (alone,) = llm.generate(prompts[i], GREEDY, use_tqdm=False)
        assert alone.outputs[0].text == batched[i]
    right = [text.startswith(answer) for text, (_, answer) in zip(batched, pairs, strict=True)]
    assert np.mean(right) >= LEAST_ACCURACY
    assert all(group.used == 0 for group in llm.stats().caches)


def test_wrong_state_changes_the_answer(llm: LLM) -> None:
    """The canary can sing: the same question over other facts has another answer."""
    first, second = recall_prompts(seed=3)[:2]
    question = " ".join(first[0].split()[-4:])
    swapped = second[0].rsplit(".", 1)[0] + ". " + question
    outputs = llm.generate([first[0], swapped], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].text != outputs[1].outputs[0].text


def test_it_fits_in_the_repository() -> None:
    files = [path for path in bundled_model().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in files
    }


def test_transformers_loads_it() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path: Path = bundled_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = tokenizer.encode(recall_prompts(seed=5)[0][0])
    with torch.no_grad():
        expected = reference.eval()(torch.tensor([ids])).logits[0].numpy()
    logits = dense_logits(load_model(path, dtype="float32"), ids)
    assert np.abs(logits - expected).max() <= 2e-4 * expected.std()
