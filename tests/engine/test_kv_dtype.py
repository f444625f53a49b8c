"""Keys and values in fewer bits: what that costs, against the rounding of the formats."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hybrid_jax.cache.snapshot import Snapshot
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.llm import LLM
from hybrid_jax.loading import load_model
from hybrid_jax.runtime.runner import Runner
from hybrid_jax.sampling_params import SamplingParams
from pallas_kernels import platform, registry
from pallas_kernels.paged_attention import mosaic_tpu
from tests.helpers import tiny
from tests.helpers.engine_checks import drive, greedy
from tests.helpers.real_engine import Rig, engine_config, random_prompt

MODEL = "gemma3"  # full and window layers
PROMPTS = [random_prompt(30 + i, seed) for seed in range(4) for i in range(6)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(MODEL, tmp_path_factory.mktemp("kv"), kv_dtype="fp8")


@pytest.fixture
def interpreted() -> Iterator[str]:
    """The TPU's kernels, interpreted, as an implementation of their own."""
    run = partial(mosaic_tpu.paged_attention, interpret=True)
    registry.register("paged_attention", "interpreted", run, mosaic_tpu.refuses)
    yield "interpreted"
    del registry._registry._entries["paged_attention"]["interpreted"]


def logprobs(runner: Runner, max_tokens: int = 1) -> np.ndarray:
    """Of each prompt's most likely next token, or the last one of some."""
    runner.reset()
    engine = Engine(runner, None)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(Request(f"r{i}", prompt, greedy(max_tokens, logprobs=0)))
    ends = drive(engine).ends
    events = [ends[(f"r{i}", 0)].logprobs for i in range(len(PROMPTS))]
    return np.array([event[0].logprob for event in events if event])


def test_float8_costs_what_its_mantissa_says(rig: Rig) -> None:
    """bfloat16 rounds by up to 2^-8 of a value and float8_e4m3fn by 2^-4.

    To first order their effect is in proportion, 16 times. The bounds leave a factor of 3 for the
    draw of 24 prompts, for values that float8 holds as subnormals, and for what is not first order.
    """
    errors = {}
    wide = logprobs(Runner(rig.model, engine_config(kv_dtype="float32")))
    for name in ("bfloat16", "fp8"):
        runner = rig.runner if name == "fp8" else Runner(rig.model, engine_config(kv_dtype=name))
        errors[name] = float(np.sqrt(np.mean((logprobs(runner) - wide) ** 2)))
    assert 16 / 3 < errors["fp8"] / errors["bfloat16"] < 16 * 3


def test_pages_take_one_byte_per_value_as_planned(rig: Rig) -> None:
    live, plan = rig.runner.live_bytes(), rig.runner.plan
    assert [line.nbytes for line in plan.lines()[1:-2]] == pytest.approx(live.groups, rel=0.05)
    for group, count, nbytes in zip(
        rig.runner.groups, rig.runner.sizes.counts, live.groups, strict=True
    ):
        spec = group.spec
        if hasattr(spec, "num_kv_heads"):
            each = 2 * spec.num_kv_heads * spec.head_dim * rig.runner.config.page_size
            assert nbytes == pytest.approx(count * each * len(group.layers), rel=0.05)


def test_a_session_goes_on_from_a_file_of_float8_pages(rig: Rig, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm = LLM.from_engine(rig.engine(), None)
    first = llm.session()
    first.generate(list(PROMPTS[0]), params)
    first.snapshot().save(tmp_path / "s")
    expected = first.generate([3, 4, 5], params).outputs[0].token_ids
    second = LLM.from_engine(rig.engine(), None)
    session = second.session(Snapshot.load(tmp_path / "s"))
    output = session.generate([3, 4, 5], params)
    assert output.outputs[0].token_ids == expected
    assert output.usage is not None and output.usage.cached_tokens == len(PROMPTS[0]) + 4


@pytest.mark.slow
def test_tpu_kernels_do_steps_over_float8_pages(
    interpreted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in several chunks, then a decode step, in the layout that pages have on TPU."""
    changes = {"num_key_value_heads": 4, "num_hidden_layers": 1, "layer_types": [tiny.FULL]}
    monkeypatch.setitem(tiny.TINY, "four_heads", tiny.TINY["qwen3"] | changes)
    model = load_model(tiny.write_checkpoint("four_heads", tmp_path, seed=0), dtype="bfloat16")

    def of(implementation: str) -> np.ndarray:
        choice = {"paged_attention": implementation}
        config = engine_config(kv_dtype="fp8", page_size=16, implementations=choice)
        return logprobs(Runner(model, config, fill=float("nan")), max_tokens=2)

    with platform.target("tpu", "TPU v6e"):
        found, expected = of(interpreted), of("reference")
    # Hidden states are bfloat16: one that is rounded the other way moves logits of a few units by
    # up to 2^-8 of them. Keys of another head or page would move them by units.
    np.testing.assert_allclose(found, expected, rtol=0, atol=8 * 2**-8)
