"""How long decode takes on this device, printed at the end of the run and not judged."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import registry, storage
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.paged_attention import paged_attention, pages_shape
from pallas_kernels.ssd import ssd
from tests.helpers.ragged import Rows
from tests.kernels.test_gated_delta_rule import CASES as GATED_DELTA
from tests.kernels.test_gated_delta_rule import draw as draw_gated_delta
from tests.kernels.test_ssd import CASES as SSD
from tests.kernels.test_ssd import draw as draw_ssd
from tests.kernels.test_ssd import on_device

pytestmark = [pytest.mark.device, pytest.mark.timeout(300)]
REPEATS = 20
ON_CPU = jax.default_backend() == "cpu"  # where the suite is only tried
ROWS = 2 if ON_CPU else 64
CONTEXT = 64 if ON_CPU else 4096
IMPLEMENTATIONS = (None, registry.REFERENCE)  # what the registry chooses, and the reference
Figure = Callable[[str], None]


def measure(
    call: Callable[..., Any], arguments: dict[str, Any], pool: str, moved: int, implementation: Any
) -> str:
    """Time of a call that takes its pool back, and the rate at which it moves `moved` bytes."""
    step = jax.jit(functools.partial(call, implementation=implementation), donate_argnames=(pool,))
    with registry.recording() as choices:
        out, arguments[pool] = jax.block_until_ready(step(**arguments))
    start = time.perf_counter()
    for _ in range(REPEATS):
        out, arguments[pool] = step(**arguments)
    jax.block_until_ready(out)
    seconds = (time.perf_counter() - start) / REPEATS
    assert bool(jnp.all(jnp.isfinite(out.astype(jnp.float32))))
    return (
        f"{choices[0].implementation}: {1e6 * seconds:,.0f} us, {moved / seconds / 1e9:,.0f} GB/s"
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "window"),
    [
        (16, 2, 256, 16, None),
        (32, 8, 128, 16, None),
        (32, 8, 128, 64, None),
        (32, 8, 128, 16, 1024),
    ],
)
def test_paged_attention(
    heads: int, kv_heads: int, dim: int, page: int, window: int | None,
    implementation: str | None, figure: Figure,
) -> None:  # fmt: skip
    width = CONTEXT // page
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (
        jax.random.normal(key, (ROWS, n, dim), jnp.bfloat16)
        for key, n in zip(keys, (heads, kv_heads, kv_heads), strict=False)
    )
    pool = jnp.ones(pages_shape(ROWS * width + 1, page, kv_heads, dim), jnp.bfloat16)
    table = 1 + jax.random.permutation(keys[3], ROWS * width).astype(jnp.int32)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "pages": storage.encode(pool, storage.storage_dtype(jnp.bfloat16)),
        "table": table.reshape(ROWS, width),
        "ragged": Rows(decode=(CONTEXT - 1,) * ROWS).ragged(),
    }
    call = functools.partial(paged_attention, scale=dim**-0.5, window=window)
    moved = ROWS * min(CONTEXT, window or CONTEXT) * 2 * kv_heads * dim * 2
    line = measure(call, arguments, "pages", moved, implementation)
    shape = f"{ROWS} x {CONTEXT} tokens, heads {heads}, {kv_heads}, {dim}, page {page}"
    figure(f"paged_attention {shape}, window {window}: {line}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", ["gated_delta_rule-qwen35_9b", "ssd-nemotron_3_nano"])
def test_recurrences(op: str, implementation: str | None, figure: Figure) -> None:
    name, model = op.split("-")
    cases, draw = (GATED_DELTA, draw_gated_delta) if name == "gated_delta_rule" else (SSD, draw_ssd)
    case = next(case for case in cases if case.name == model)
    tokens = draw(case, ROWS)
    slots = jnp.arange(1, ROWS + 1, dtype=jnp.int32)
    arguments = {
        **tokens.on_device(),
        "state": jnp.ones((ROWS + 1, *tokens.state_shape), jnp.float32),
        "ragged": Rows(decode=(9,) * ROWS).ragged(),
        "read_slots": slots,
        "write_slots": slots,
    }
    call: Callable[..., Any] = gated_delta_rule
    if name == "ssd":
        call, arguments = ssd, arguments | on_device(case)
    moved = 2 * 4 * ROWS * arguments["state"][0].size
    line = measure(call, arguments, "state", moved, implementation)
    figure(f"{name} {model}, {ROWS} rows: {line}")
