"""Settings that every test runs under: CPU, four virtual devices, no implicit promotion.

Steps that are equal compile once per session: the compilation cache lies in a temporary directory.
"""

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = os.environ.get("HYBRID_JAX_TEST_PLATFORM", "cpu")
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=4".strip()

import jax  # noqa: E402  the environment above is read on import

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_CACHE = tempfile.mkdtemp(prefix="compiled-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
