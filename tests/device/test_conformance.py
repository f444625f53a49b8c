"""Every op as the registry runs it on this device, on all its cases, against the float64 oracles.

Batches with prefill rows run the reference wherever no kernel takes them.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import pytest

from pallas_kernels.gated_delta_rule.cases import CASES as GATED_DELTA
from pallas_kernels.gated_delta_rule.cases import MXU_STATE_ATOL as GATED_DELTA_ATOL
from pallas_kernels.gla.cases import CASES as GLA
from pallas_kernels.gla.cases import MXU_STATE_ATOL as GLA_ATOL
from pallas_kernels.paged_attention.cases import CASES as ATTENTION
from pallas_kernels.registry import REFERENCE
from pallas_kernels.rows import clear_rows, copy_rows
from pallas_kernels.rows.cases import CASES as ROWS
from pallas_kernels.ssd.cases import CASES as SSD
from pallas_kernels.ssd.cases import MXU_STATE_ATOL as SSD_ATOL
from tests.helpers.ragged import Rows
from tests.kernels import (
    test_causal_conv1d,
    test_gated_delta_net,
    test_gated_delta_rule,
    test_gla,
    test_mamba2,
    test_paged_attention,
    test_rows,
    test_rwkv7,
    test_selective_scan,
    test_ssd,
)
from tests.kernels.test_paged_attention_gpu import WEIGHTS_ATOL

pytestmark = [pytest.mark.device, pytest.mark.timeout(300)]
BATCHES = {
    "decode": Rows(decode=(0, 1, 9, 143), pad_rows=2),
    "mixed": Rows(decode=(0, 9), prefill=((0, 5), (3, 70)), pad_rows=1),
}


def rounding(case: Any, **extra: float) -> Any:
    """The case with more tolerance if kernels multiply its operands as bfloat16."""
    if case.dtype != "bfloat16":
        return case
    return replace(case, **{name: getattr(case, name) + more for name, more in extra.items()})


CASES = {
    test_causal_conv1d: test_causal_conv1d.CASES,
    test_gated_delta_net: [
        rounding(case, state_atol=GATED_DELTA_ATOL) for case in test_gated_delta_net.CASES
    ],
    test_gated_delta_rule: [rounding(case, state_atol=GATED_DELTA_ATOL) for case in GATED_DELTA],
    test_gla: [rounding(case, atol=GLA_ATOL, state_atol=GLA_ATOL) for case in GLA],
    test_mamba2: [rounding(case, atol=SSD_ATOL, state_atol=SSD_ATOL) for case in test_mamba2.CASES],
    test_rwkv7: test_rwkv7.CASES,
    test_selective_scan: test_selective_scan.CASES,
    test_ssd: [rounding(case, atol=SSD_ATOL, state_atol=SSD_ATOL) for case in SSD],
}
RECURRENCES = [
    pytest.param(module, case, id=f"{module.op.__name__.split('.')[-1]}-{case.name}")
    for module, cases in CASES.items()
    for case in cases
]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("module", "case"), RECURRENCES)
def test_recurrences(module: Any, case: Any, batch: str) -> None:
    # Otherwise the reference rounds float32 to tf32 on GPUs and to bfloat16 on TPUs.
    with jax.default_matmul_precision("highest"):
        module.check(case, BATCHES[batch], None)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_attention(case: Any, batch: str) -> None:
    exact = case.dtype == "float32"
    with jax.default_matmul_precision("highest") if exact else nullcontext():
        setup = test_paged_attention.Setup(rounding(case, atol=WEIGHTS_ATOL), BATCHES[batch])
        test_paged_attention.check(setup, None)


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
def test_rows_of_pools(case: Any) -> None:
    test_rows.check(case, jax.jit(copy_rows), jax.jit(clear_rows))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "module", [test_gated_delta_rule, test_gla, test_ssd], ids=lambda m: m.__name__
)
def test_references_of_ops_with_kernels(module: Any, batch: str) -> None:
    with jax.default_matmul_precision("highest"):
        for case in module.SMALL:
            module.check(case, BATCHES[batch], REFERENCE)
