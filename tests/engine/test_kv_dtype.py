"""Keys and values in fewer bits: what that costs, against the rounding of the formats."""

from pathlib import Path

import numpy as np
import pytest

from hybrid_jax.cache.snapshot import Snapshot
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.llm import LLM
from hybrid_jax.runtime.runner import Runner
from hybrid_jax.sampling_params import SamplingParams
from tests.helpers.engine_checks import drive, greedy
from tests.helpers.real_engine import Rig, engine_config, random_prompt

MODEL = "gemma3"  # full and window layers
PROMPTS = [random_prompt(30 + i, seed) for seed in range(4) for i in range(6)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(MODEL, tmp_path_factory.mktemp("kv"), kv_dtype="fp8")


def logprobs(runner: Runner) -> np.ndarray:
    """Of each prompt's most likely next token."""
    runner.reset()
    engine = Engine(runner, None)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(Request(f"r{i}", prompt, greedy(1, logprobs=0)))
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
