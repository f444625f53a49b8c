"""copy_rows and clear_rows against numpy, and the TPU kernels interpreted on CPU."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import registry
from pallas_kernels.rows import clear_rows, copy_rows, mosaic_tpu
from pallas_kernels.rows.cases import CASES, Case

CASE = {case.name: case for case in CASES}
RACE = "RACE DETECTED"  # what the interpreter prints; it does not raise


def drawn(case: Case) -> np.ndarray:
    values = np.random.default_rng(0).integers(1, 100, size=case.shape)
    return np.array(jnp.asarray(values, case.dtype))


def rows(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def check(case: Case, copy, clear) -> None:
    """Pairs that only pad, a row copied to two others, and a row to itself."""
    before = drawn(case)
    after = before.copy()
    after[[5, 8, 2]] = before[[3, 3, 7]]
    out = copy(jnp.asarray(before), rows(3, 3, 0, 7, 4, 6), rows(5, 8, 0, 2, 4, 0))
    np.testing.assert_array_equal(out, after)
    before[[1, 6]] = 0
    np.testing.assert_array_equal(clear(jnp.asarray(drawn(case)), rows(6, 0, 1, 0)), before)


@pytest.mark.parametrize("name", ["tiny", "tiny_bf16", "tiny_bits"])
def test_reference(name: str) -> None:
    check(CASE[name], jax.jit(copy_rows), jax.jit(clear_rows))


def test_nothing_to_do() -> None:
    before = drawn(CASE["tiny"])
    empty = jnp.zeros(0, jnp.int32)
    np.testing.assert_array_equal(copy_rows(jnp.asarray(before), empty, empty), before)
    np.testing.assert_array_equal(clear_rows(jnp.asarray(before), rows(0, 0)), before)


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.timeout(300)
def test_tpu_kernels(
    mode: Literal["on_wait", "eager"], monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.setattr(mosaic_tpu, "ZEROS", 2 * 8 * 128 * 4)  # a row in two transfers
    interpret = pltpu.InterpretParams(
        detect_races=True,
        vector_clock_size=64,
        dma_execution_mode=mode,
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
    )
    write = jax.jit(functools.partial(mosaic_tpu.write, interpret=interpret))
    check(CASE["tiny"], write, lambda pool, rows: write(pool, None, rows))
    assert RACE not in capfd.readouterr().out


def facts(dtype: str, *shape: int, platform: str = "tpu") -> registry.Facts:
    items = (("pool", registry.ArrayFacts(shape, dtype)),)
    return registry.Facts(platform, "TPU v6 lite", items)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (facts("uint16", *CASE["tiny"].shape), "not uint16"),
        (facts("float32", 9, 128), "not (128,)"),
        (facts("float32", 9, 8, 64), "not (8, 64)"),
        (facts("bfloat16", 9, 3, 8192), "whole tiles, not (3, 8192) of bfloat16"),
    ],
)
def test_refusals_have_reasons(refused: registry.Facts, reason: str) -> None:
    assert reason in str(mosaic_tpu.refuses(refused))
    assert mosaic_tpu.refuses(facts("float32", *CASE["tiny"].shape)) is None


@pytest.mark.parametrize(
    ("sources", "targets"),
    [(rows(1, 2), rows(1)), (rows(1), jnp.ones(1)), (rows(1)[None], rows(1)[None])],
)
def test_bad_arguments_are_named(sources: jax.Array, targets: jax.Array) -> None:
    with pytest.raises(ValueError, match="lists of int32 of one length, got int32"):
        copy_rows(jnp.zeros((3, 8)), sources, targets)
    with pytest.raises(ValueError, match=r"pool must be \[N, ...\]"):
        clear_rows(jnp.zeros(3), rows(1))
