"""Nothing compiles after the warm-up, whatever is asked for."""

import random
from pathlib import Path

import pytest

from hybrid_jax.engine.batch_builder import step_shapes
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.runtime.runner import Runner
from hybrid_jax.sampling_params import SamplingParams
from tests.helpers.engine_checks import drive
from tests.helpers.real_engine import (
    Rig,
    compile_log,
    engine_config,
    random_prompt,
    random_requests,
    schedule_of,
)

SAMPLED = (
    SamplingParams(temperature=0.8, top_k=5, max_tokens=6, logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, max_tokens=9, seed=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.5, max_tokens=7),
    SamplingParams(temperature=0.5, logit_bias={5: 3.0}, stop_token_ids=[7], min_tokens=3),
    SamplingParams(temperature=0.0, logits_processors=("even",), max_tokens=5),
    SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=2),
)


@pytest.mark.parametrize("guesses", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_compiles_after_the_warm_up(guesses: int, tmp_path: Path) -> None:
    rig = Rig("lara_mini-untied", tmp_path)  # its model and oracle; its own runner never runs
    config = engine_config(
        max_num_seqs=4,
        row_buckets=(2, 4),
        token_buckets=(16,),
        prefill_alignment=8,
        checkpoint_interval=8,
        debug_poison=True,
        num_pages=16,  # little enough for preemptions
        swap_bytes=2**20,
        num_speculative_tokens=guesses,
        warmup=True,
    )
    runner = Runner(rig.model, config, processors={"even": lambda logits, context: logits})
    engine = Engine(runner, None)
    buckets = len(step_shapes(runner.config))
    assert runner.num_compiles == buckets == 4

    rng = random.Random(0)
    plain = random_requests(rng, 12)
    sampled = [
        Request(f"s{i}", random_prompt(3 + 5 * i, i), params) for i, params in enumerate(SAMPLED)
    ]
    sampled.append(Request("fork", random_prompt(11, 3), SamplingParams(n=3)))
    engine._scheduler.chunk_limit = lambda sequence, remaining: rng.choice([1, 3, 16])
    with compile_log() as events:
        before_step = schedule_of(
            engine, [*plain, *sampled], rng, last_arrival=30, abort_share=0.1, aborted=set()
        )
        record = drive(engine, before_step=before_step, until=45)
    assert events == []
    assert runner.num_compiles == engine.stats().compiles == buckets
    ended = [r for r in plain if record.ends[(r.request_id, 0)].finish_reason == "length"]
    assert len(ended) > 6
    assert engine.stats().cached_tokens > 10  # a hit or a fork, at least
    assert engine.stats().swap.num_in > 0
    assert (engine.stats().speculation.accepted_tokens > 0) == bool(guesses)
    rig.oracle.check(record, ended)


def test_the_log_of_compiles_sees_a_compile() -> None:
    """Otherwise the test above could not fail."""
    import jax
    import jax.numpy as jnp

    with compile_log() as events:
        jax.jit(lambda x: x * 3 + 1)(jnp.arange(7))
    assert any("backend_compile" in name for name in events)
    with compile_log() as events:
        pass
    assert events == []
