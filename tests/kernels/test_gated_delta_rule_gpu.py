"""The Triton kernel of gated_delta_rule, interpreted on CPU, against the float64 oracle."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import platform
from pallas_kernels.gated_delta_rule import triton_gpu
from pallas_kernels.gated_delta_rule.cases import CASES, Case
from pallas_kernels.registry import Facts
from tests.helpers import slots
from tests.helpers.ragged import Rows, delta_rule_oracle
from tests.helpers.slots import DECODE_BATCHES
from tests.kernels.test_gated_delta_rule import draw

CASE = {case.name: case for case in CASES}
SMALL = [case for case in CASES if case.name.startswith("tiny")]
LARGE = [case for case in CASES if not case.name.startswith("tiny")]
# Neither dimension is a power of two, and the columns take several programs.
UNEVEN = Case("uneven_bf16", 2, 6, 24, 80, dtype="bfloat16", atol=4e-3, per_channel=True)


@functools.cache
def _jitted(l2norm: bool = True):
    return jax.jit(
        functools.partial(triton_gpu.gated_delta_rule, scale=None, l2norm=l2norm, interpret=True)
    )


def check(case: Case, rows: Rows, *, seed: int = 0, shared: bool = False) -> None:
    tokens = draw(case, rows.num_tokens, seed)
    slots.check(_jitted(), tokens, rows, atol=case.atol, state_atol=case.state_atol,
                seed=seed, shared=shared)  # fmt: skip


@pytest.mark.parametrize("batch", DECODE_BATCHES)
@pytest.mark.parametrize("case", [*SMALL, UNEVEN], ids=lambda case: case.name)
def test_decode(case: Case, batch: str) -> None:
    check(case, DECODE_BATCHES[batch])


def test_keys_that_are_not_normalised() -> None:
    case, rows = SMALL[0], DECODE_BATCHES["mixed_ages"]
    tokens = draw(case, rows.num_tokens)
    arrays = dict(tokens.arrays) | {name: tokens.arrays[name] / 4 for name in "qk"}
    oracle = functools.partial(delta_rule_oracle, scale=case.k_dim**-0.5, l2norm=False)
    arrays = {name: slots.rounded(x, "float32") for name, x in arrays.items()}
    tokens = replace(tokens, arrays=arrays, oracle=oracle)
    slots.check(_jitted(False), tokens, rows, atol=case.atol, state_atol=case.state_atol)


def test_rows_may_read_one_slot() -> None:
    check(SMALL[0], Rows(decode=(5, 0, 5, 9)).padded(7, 7), shared=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_model_shapes(case: Case) -> None:
    check(case, Rows(decode=(0, 9), pad_rows=1))


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_random_batches(case: Case) -> None:
    rng = np.random.default_rng(7)
    for seed in range(5):
        decode = tuple(int(n) for n in rng.integers(0, 3, size=rng.integers(0, 8)))
        check(case, Rows(decode).padded(7, 7), seed=seed)


def test_states_in_bfloat16_are_rounded_when_written() -> None:
    """What a float32 pool would hold, rounded once."""
    case, rows = SMALL[0], Rows(decode=(3, 0), pad_rows=1)
    before = np.random.default_rng(1).normal(size=(4, *draw(case, 1).state_shape))
    index = jnp.asarray([2, 3, 0], jnp.int32)
    states = {}
    for dtype in ("bfloat16", "float32"):
        pool = jnp.asarray(before, jnp.bfloat16).astype(dtype)
        _, states[dtype] = _jitted()(
            **draw(case, 3).on_device(), state=pool, ragged=rows.ragged(),
            read_slots=index, write_slots=index,
        )  # fmt: skip
    assert states["bfloat16"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(states["bfloat16"], states["float32"].astype(jnp.bfloat16))


def facts(case: Case, kind: str = "NVIDIA A100-SXM4-80GB", name: str = "gpu", **changes) -> Facts:
    state = jax.ShapeDtypeStruct((9, case.num_v_heads, case.k_dim, case.v_dim), jnp.float32)
    with platform.target(name, kind):
        return Facts.of(**({"state": state, "decode_only": True} | changes))


def test_refusals_have_reasons() -> None:
    for case in CASES:
        assert triton_gpu.refuses(facts(case)) is None
    for refused, reason in (
        (facts(SMALL[0], "Tesla V100-SXM2-16GB"), "not for 'Tesla V100-SXM2-16GB'"),
        (facts(SMALL[0], decode_only=False), "prefill"),
        (facts(Case("large", 1, 1, 1024, 64)), "1024 values are above 512"),
    ):
        assert reason in str(triton_gpu.refuses(refused))
