"""Whole decode steps compile for GPUs, in place, with the kernels that the registry names."""

import pytest

from hybrid_jax.runtime.batch import StepKind
from pallas_kernels import registry
from tests.helpers.gpu import compile_for, needs_cuda
from tests.kernels.test_whole_step_tpu import build, check_step

pytestmark = [needs_cuda, pytest.mark.slow]
# Per model: what runs its ops, and how often each kernel.
CASES = {
    "qwen35_9b": (
        dict.fromkeys(("causal_conv1d", "gated_delta_rule", "paged_attention"), "triton_gpu"),
        dict.fromkeys(("causal_conv1d_decode", "gated_delta_decode", "paged_attention_decode"), 1),
    ),
    "gemma3_4b": ({"paged_attention": "triton_gpu"}, {"paged_attention_decode": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_decode_step(name: str) -> None:
    step = build(name, StepKind.DECODE, "h100")
    with registry.recording() as choices:
        compiled = compile_for("h100", step.fn, step.arguments, donate=(1,))
    check_step(step, compiled, choices, *CASES[name])
