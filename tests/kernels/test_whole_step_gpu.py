"""Whole steps compile for GPUs, in place, with the kernels that the registry names."""

import pytest

from hybrid_jax.runtime.batch import StepKind
from pallas_kernels import registry
from tests.helpers.gpu import compile_for, needs_cuda
from tests.kernels.test_whole_step_tpu import build, check_step

pytestmark = [needs_cuda, pytest.mark.slow]
TRITON = "triton_gpu"
MIXED_ATTENTION = ("paged_attention_decode", "paged_attention_write", "paged_attention_prefill")
# Per model and phase: what runs its ops, and how often each kernel.
CASES = {
    ("qwen35_9b", StepKind.DECODE): (
        dict.fromkeys(("causal_conv1d", "gated_delta_rule", "paged_attention"), TRITON),
        dict.fromkeys(("causal_conv1d_decode", "gated_delta_decode", "paged_attention_decode"), 1),
    ),
    ("qwen35_9b", StepKind.MIXED): (
        dict.fromkeys(("causal_conv1d", "gated_delta_rule", "paged_attention"), TRITON),
        dict.fromkeys(("causal_conv1d_prefill", "gated_delta_prefill", *MIXED_ATTENTION), 1),
    ),
    ("gemma3_4b", StepKind.DECODE): ({"paged_attention": TRITON}, {"paged_attention_decode": 2}),
    ("gemma3_4b", StepKind.MIXED): (
        {"paged_attention": TRITON},
        dict.fromkeys(MIXED_ATTENTION, 2),
    ),
}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_step(name: str, kind: StepKind) -> None:
    step = build(name, kind, "h100")
    with registry.recording() as choices:
        compiled = compile_for("h100", step.fn, step.arguments, donate=(1,))
    check_step(step, compiled, choices, *CASES[name, kind])
