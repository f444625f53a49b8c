"""The TPU kernels of paged_attention, interpreted on CPU, on the cases of the reference.

`interpret=True` is quick and goes broad. It does not see a missing wait or a copy into a buffer in
use; the interpreter of TPU semantics does, with race detection and in both ways of timing copies,
but it needs milliseconds per page: a few pages only.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import registry, storage
from pallas_kernels.paged_attention import mosaic_tpu
from pallas_kernels.paged_attention.cases import CASES, Case
from tests.helpers.ragged import Rows
from tests.kernels.test_paged_attention import Setup

BATCHES = {
    "decode": Rows(decode=(0, 1, 7, 8, 9, 130, 300), pad_rows=2),
    "one_decode": Rows(decode=(17,)),
    "two_steps": Rows(decode=(3, 40, 5, 0, 1, 2, 33, 9, 60, 11), pad_rows=7),
    "padding": Rows(pad_rows=4),
}


def facts(setup: Setup, platform: str = "tpu") -> registry.Facts:
    """What the registry would be told for this setup on a TPU."""
    case, dtype = setup.case, str(setup.dtype)
    values = {
        "q": registry.ArrayFacts(setup.q.shape, dtype),
        "k": registry.ArrayFacts(setup.k.shape, dtype),
        "v": registry.ArrayFacts(setup.v.shape, dtype),
        "pages": registry.ArrayFacts(setup.before.shape, dtype),
        "table": registry.ArrayFacts(setup.table.shape, "int32"),
        "decode_only": setup.rows.ragged().decode_only,
        "window": case.window,
        "softcap": case.softcap,
        "sinks": case.sinks,
    }
    return registry.Facts(platform, "TPU v6 lite", tuple(sorted(values.items())))


@functools.cache
def _jitted(options: tuple, interpret):
    call = functools.partial(mosaic_tpu.paged_attention, interpret=interpret, **dict(options))
    return jax.jit(call)


def check(setup: Setup, interpret=True) -> None:
    """The kernels' output against the oracle, and every page: those not written stay NaN."""
    reason = mosaic_tpu.refuses(facts(setup))
    if reason is not None:
        pytest.skip(f"refused: {reason}")
    call = _jitted(tuple(setup.options.items()), interpret)
    q, k, v, pages = (jnp.asarray(x, setup.dtype) for x in (setup.q, setup.k, setup.v, setup.before))
    sinks = None if setup.sinks is None else jnp.asarray(setup.sinks, jnp.float32)
    out, pages = call(q, k, v, pages, jnp.asarray(setup.table), setup.rows.ragged(), sinks=sinks)
    assert out.dtype == setup.dtype and pages.dtype == setup.dtype
    atol = setup.case.atol
    np.testing.assert_allclose(np.asarray(out, np.float64), setup.expected(), rtol=0, atol=atol)
    pages = np.asarray(storage.decode(pages), np.float64)
    np.testing.assert_array_equal(pages[1:], setup.after[1:])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case: Case, batch: str) -> None:
    check(Setup(case, BATCHES[batch]))
