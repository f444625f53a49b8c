"""Settings that every test runs under: CPU, four virtual devices, no implicit promotion.

Steps that are equal compile once per session: the compilation cache lies in a temporary directory.
HYBRID_JAX_SLOW_TESTS_UNTIL, in seconds since 1970, skips slow tests that would begin later.
"""

import atexit
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

os.environ["JAX_PLATFORMS"] = os.environ.get("HYBRID_JAX_TEST_PLATFORM", "cpu")
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=4".strip()

import jax  # noqa: E402  the environment above is read on import
import pytest  # noqa: E402

from tests.helpers.compiler import hasty  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_CACHE = tempfile.mkdtemp(prefix="compiled-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

# Folders with large programs that run once or twice. Others run what users run, as it is optimised.
_HASTY = {"decoding", "engine", "kernels", "serving", "unit"}

_SLOW_UNTIL = float(os.environ.get("HYBRID_JAX_SLOW_TESTS_UNTIL", "inf"))

_MAPS = Path("/proc/self/maps")


def _keep_memory_maps_below(limit: int) -> None:
    """Compiled programs hold memory maps; a process dies of more than Linux grants it, 65,530."""
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > limit:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps() -> Iterator[None]:
    """Best between modules, whose tests share what they compile."""
    yield
    _keep_memory_maps_below(20_000)


@pytest.fixture(autouse=True)
def not_all_memory_maps() -> Iterator[None]:
    """An interpreted kernel has 2,000, and a module many of them."""
    yield
    _keep_memory_maps_below(45_000)


@pytest.fixture(autouse=True, scope="module")
def hasty_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Optimising for CPUs is a third of what tests cost; programs for TPUs and GPUs still are."""
    with hasty(True) if request.path.parent.name in _HASTY else nullcontext():
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A machine may be too slow for all of them."""
    if item.get_closest_marker("slow") and time.time() > _SLOW_UNTIL:
        pytest.skip("slow, and HYBRID_JAX_SLOW_TESTS_UNTIL is over")
