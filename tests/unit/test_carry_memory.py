"""Pages of TPUs look on the host as those of every other platform do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.cache.arrays import CacheSizes, PagedCache
from hybrid_jax.config import EngineConfig
from hybrid_jax.models import config_from_hf
from hybrid_jax.runtime.memory import CarryMemory
from hybrid_jax.runtime.mesh import Partitioner, abstract_mesh
from hybrid_jax.runtime.step import init_carry
from hybrid_jax.specs import CacheGroup, PagedSpec
from pallas_kernels import platform
from tests.helpers import tiny

CONFIG = EngineConfig(max_num_seqs=2, max_model_len=64, max_num_batched_tokens=64)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 64), (3, 80), (2, 128)])
def test_pages_are_read_as_they_were_written(kv_heads: int, head_dim: int) -> None:
    model = config_from_hf(tiny.TINY["qwen3"])
    groups = (CacheGroup(PagedSpec(kv_heads, head_dim, "float32"), (0,)),)
    with platform.target("tpu", "TPU v6 lite"):
        carry = init_carry(groups, CacheSizes(4, (6,)), CONFIG.resolve(model), fill=np.nan)
    memory = CarryMemory(groups, carry, sharded=False)
    held = np.random.default_rng(5).normal(size=(2, 4, 2 * kv_heads, head_dim)).astype(np.float32)
    carry = memory.write(carry, 0, [3, 1], {"0.pages": held}, owner=0)
    np.testing.assert_array_equal(memory.read(carry, 0, [3, 1])["0.pages"], held)
    (cache,) = carry.caches
    assert isinstance(cache, PagedCache) and cache.pages.shape[3] == 128
    assert not np.isnan(cache.pages[jnp.array([1, 3])]).any()  # what fills up rows, too
    assert np.isnan(cache.pages[jnp.array([2, 4, 5])]).all()


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "cut"), [(2, 64, True), (4, 80, True), (6, 128, False)]
)
def test_pages_are_cut_by_head_or_not_at_all(kv_heads: int, head_dim: int, cut: bool) -> None:
    """The 12 rows of six heads become 16: half of them are no heads' rows."""
    model = config_from_hf(tiny.TINY["qwen3"])
    groups = (CacheGroup(PagedSpec(kv_heads, head_dim, "float32"), (0,)),)
    shardings: list[jax.sharding.NamedSharding] = []

    def full(shape: tuple[int, ...], value: object, dtype: object, *, device: object) -> None:
        if len(shape) == 4:
            assert isinstance(device, jax.sharding.NamedSharding)
            shardings.append(device)

    partitioner = Partitioner(model, abstract_mesh(2))
    with platform.target("tpu", "TPU v6 lite"):
        sizes, config = CacheSizes(4, (6,)), CONFIG.resolve(model)
        init_carry(groups, sizes, config, partitioner=partitioner, full=full)
        heads = {"num_key_value_heads": kv_heads, "num_attention_heads": 12, "head_dim": head_dim}
        model = config_from_hf(tiny.TINY["qwen3"] | heads)
        refusals = Partitioner(model, abstract_mesh(2)).refusals()
    (sharding,) = shardings
    assert ("tensor" in sharding.spec) is cut
    named = f"pages of {kv_heads} kv_heads, on this device they have rows of no head: replicated"
    assert refusals == ([] if cut else [named])
