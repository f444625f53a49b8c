"""Two and four virtual devices give the tokens of one, and really share the work."""

from pathlib import Path

import jax
import pytest

from hybrid_jax.cache.arrays import PagedCache, StateCache
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.llm import LLM
from hybrid_jax.loading import load_model
from hybrid_jax.runtime.runner import Runner, open_model
from tests.helpers import tiny
from tests.helpers.engine_checks import drive, greedy
from tests.helpers.real_engine import Oracle, engine_config, random_prompt


def is_cut(array: jax.Array, size: int) -> bool:
    """Whether every device holds its own part; otherwise all must hold all of it."""
    shapes = {shard.data.shape for shard in array.addressable_shards}
    assert len(array.addressable_shards) == size and len(shapes) == 1
    elements = array.size // jax.numpy.zeros(shapes.pop()).size
    assert elements in (1, size)
    return elements == size


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["qwen3_5", "gemma3"])
def test_tokens_are_those_of_one_device(name: str, size: int, tmp_path: Path) -> None:
    """Two KV heads: they are cut over two devices and replicated over four.

    The second time all prompts hit the prefix cache, and a page is copied.
    """
    directory = tiny.write_checkpoint(name, tmp_path, seed=0)
    config = engine_config(
        tensor_parallel_size=size,
        max_num_seqs=4,
        row_buckets=(4,),
        prefill_alignment=8,
        checkpoint_interval=8,
        debug_poison=True,
    )
    model = open_model(directory, dtype="float32", config=config)
    runner = Runner(model, config, fill=float("nan"))
    engine = Engine(runner, None)
    oracle = Oracle(load_model(directory, dtype="float32"))
    for turn, completions in enumerate((1, 2)):
        requests = [
            Request(f"r{turn}-{n}", random_prompt(n, 0), greedy(12, n=completions))
            for n in (1, 3, 9, 17, 33)
        ]
        for request in requests:
            engine.add_request(request)
        oracle.check(drive(engine), requests)
    assert engine.stats().cached_tokens > 8 + 16 + 32

    for path, array in model.params.items():
        if path.endswith(("q_proj.weight", "gate_proj.weight", "embed_tokens.weight")):
            assert is_cut(array, size), path
        if path.endswith(("k_proj.weight", "v_proj.weight")):
            assert is_cut(array, size) == (size == 2), path
        if path.endswith("norm.weight"):
            assert not is_cut(array, size), path
    for cache in runner._carry.caches:
        if isinstance(cache, PagedCache):
            assert is_cut(cache.pages, size) == (size == 2)
            continue
        assert isinstance(cache, StateCache)
        assert is_cut(cache.recurrent, size)  # four value heads
        assert not is_cut(cache.conv, size)
    assert not is_cut(runner._carry.last_token, size)


def test_too_many_devices_are_refused_with_the_remedy(tmp_path: Path) -> None:
    directory = tiny.write_checkpoint("qwen3", tmp_path, seed=0)
    many = len(jax.devices()) + 1
    with pytest.raises(ValueError, match=f"tensor_parallel_size {many} needs.*XLA_FLAGS"):
        LLM(directory, tensor_parallel_size=many)


def test_axes_that_do_not_divide_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tiny.write_checkpoint("gemma3", tmp_path, seed=0)
    config = engine_config(tensor_parallel_size=4)
    with caplog.at_level("INFO"):
        Runner(open_model(directory, dtype="float32", config=config), config)
    assert "2 kv_heads do not divide by 4: replicated" in caplog.text
