"""Keys and values in fewer bits: what that costs, against the rounding of the formats."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.cache.snapshot import Snapshot
from hybrid_jax.calibration import calibrate_kv
from hybrid_jax.decoding import Workspace
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.layers.context import rope_tables
from hybrid_jax.llm import LLM
from hybrid_jax.loading import load_model
from hybrid_jax.models.decoder import Params, bind
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
def wide(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(MODEL, tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def rigs(wide: Rig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rig]:
    """With K and V of bytes: without scales, and calibrated on other prompts than the tests'."""
    directory = tmp_path_factory.mktemp("bytes")
    others = [random_prompt(40, seed) for seed in range(10, 20)]
    calibrate_kv(LLM.from_engine(wide.engine(), None), others, directory / "ranges.json")
    return {
        "fp8": Rig(MODEL, directory, kv_dtype="fp8"),
        "int8": Rig(MODEL, directory, kv_dtype="int8", kv_ranges=str(directory / "ranges.json")),
    }


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


def error_of(runner: Runner, exact: Runner) -> float:
    return float(np.sqrt(np.mean((logprobs(runner) - logprobs(exact)) ** 2)))


@pytest.fixture(scope="module")
def float8_error(wide: Rig, rigs: dict[str, Rig]) -> float:
    return error_of(rigs["fp8"].runner, wide.runner)


def test_int8_costs_what_its_steps_say(
    wide: Rig, rigs: dict[str, Rig], float8_error: float
) -> None:
    """int8 rounds by up to 1/254 of the largest value, and float8_e4m3fn by 2^-4 of the value.

    To first order their effect is in proportion: 2.9 times, where the largest is 4 times the
    typical value x (0.72 * 2^-3 x / sqrt(12) against 4 x / 127 / sqrt(12); 0.72 is what the
    rounding of a value within its binade comes to). The bounds leave a factor of 3 for the draw of
    24 prompts, for values that float8 holds as subnormals, and for what is not first order.
    """
    ratio = float8_error / error_of(rigs["int8"].runner, wide.runner)
    typical = 0.72 * 2**-3 / (4 / 127)
    assert typical / 3 < ratio < typical * 3


@pytest.mark.slow
def test_float8_costs_what_its_mantissa_says(wide: Rig, float8_error: float) -> None:
    """As above, against bfloat16, which rounds by up to 2^-8 of a value: 16 times."""
    narrow = Runner(wide.model, engine_config(kv_dtype="bfloat16"))
    assert 16 / 3 < float8_error / error_of(narrow, wide.runner) < 16 * 3


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_pages_take_one_byte_per_value_as_planned(name: str, rigs: dict[str, Rig]) -> None:
    rig = rigs[name]
    live, plan = rig.runner.live_bytes(), rig.runner.plan
    assert [line.nbytes for line in plan.lines()[1:-2]] == pytest.approx(live.groups, rel=0.05)
    for group, count, nbytes in zip(
        rig.runner.groups, rig.runner.sizes.counts, live.groups, strict=True
    ):
        spec = group.spec
        if hasattr(spec, "num_kv_heads"):
            each = 2 * spec.num_kv_heads * spec.head_dim * rig.runner.config.page_size
            assert nbytes == pytest.approx(count * each * len(group.layers), rel=0.05)


@pytest.mark.parametrize("name", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_session_goes_on_from_a_file_of_its_pages(
    name: str, rigs: dict[str, Rig], tmp_path: Path
) -> None:
    rig = rigs[name]
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


def test_a_prefix_of_int8_pages_is_found_again(rigs: dict[str, Rig]) -> None:
    """Cold and warm give the same tokens: what is cached is what was computed."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm = LLM.from_engine(rigs["int8"].engine(), None)
    outputs = [llm.generate(list(PROMPTS[1]), params, use_tqdm=False)[0] for _ in range(2)]
    assert outputs[1].usage is not None and outputs[1].usage.cached_tokens > 0
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_calibration_finds_the_largest_values_of_a_dense_pass(wide: Rig, tmp_path: Path) -> None:
    prompts = [random_prompt(7, seed) for seed in (1, 2)]  # within a window, beyond a page
    calibrate_kv(LLM.from_engine(wide.engine(), None), prompts, tmp_path / "r.json")
    measured = json.loads((tmp_path / "r.json").read_text())
    expected = np.max([dense_ranges(wide, jnp.asarray(prompt)) for prompt in prompts], axis=0)
    for i, layer in enumerate(expected):
        for which, values in zip("kv", layer, strict=True):
            np.testing.assert_allclose(measured[str(i)][which], values, rtol=1e-4)


def dense_ranges(rig: Rig, prompt: jax.Array) -> np.ndarray:
    """The largest |K| and |V| of a pass without caches: f32[layers, 2, K]."""

    @jax.jit
    def ranges(params: Params) -> jax.Array:
        model, found = bind(rig.model.graph, params), []
        x = model._embed(prompt)
        rope = rope_tables(model.config.layers, jnp.arange(len(prompt), dtype=jnp.int32))
        for layer in model.layers:
            _, k, v, _ = layer.mixer._project(layer.pre_mixer_norm(x), rope)
            found.append([jnp.abs(values).max(axis=(0, 2)) for values in (k, v)])
            x = layer.dense(x, rope)
        return jnp.array(found)

    return np.asarray(ranges(rig.model.params))


def test_bytes_do_not_calibrate(rigs: dict[str, Rig], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="K and V are int8 here; calibrate with"):
        calibrate_kv(LLM.from_engine(rigs["int8"].engine(), None), [[1, 2, 3]], tmp_path / "r")


def test_int8_without_ranges_is_refused_with_the_remedy(wide: Rig) -> None:
    with pytest.raises(ValueError, match="int8 needs the ranges of K and V.*calibrate_kv"):
        Runner(wide.model, engine_config(kv_dtype="int8"))


@pytest.mark.slow
def test_a_session_reads_and_edits_values_and_not_what_pages_hold(
    wide: Rig, rigs: dict[str, Rig]
) -> None:
    """Of layer 0, whose K and V depend on no pages. Both come back as they were, to the bit."""
    exact = Workspace(wide.model, **vars(wide.runner.config)).session()
    options = vars(rigs["int8"].runner.config)
    session = Workspace(rigs["int8"].model, **options).session()
    for each in (exact, session):
        each.prefill(PROMPTS[0])
    ranges = rigs["int8"].model.config.layers[0].mixer
    for i, largest in ((1, ranges.k_range), (2, ranges.v_range)):
        bound = np.array(largest)[:, None] / 254 * 1.001
        wanted = np.clip(exact.kv(0)[i], -254 * bound, 254 * bound)
        assert (np.abs(session.kv(0)[i] - wanted) <= bound).all()
    before = session.kv(0)
    session.set_kv(0, before.keys, before.values)
    for old, new in zip(before, session.kv(0), strict=True):
        np.testing.assert_array_equal(old, new)
    session.set_kv(0, 1e9 * before.keys, before.values)
    assert np.abs(session.kv(0).keys).max() == pytest.approx(max(ranges.k_range), rel=1e-6)


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
