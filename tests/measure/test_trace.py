"""Times of instructions from made-up traces, and their places from made-up HLO."""

import random

import pytest

from hybrid_jax.errors import HybridJaxError
from hybrid_jax.measure.scopes import op_names, place_of
from hybrid_jax.measure.trace import Event, self_times, summarise


def event(
    name: str,
    start: float,
    end: float,
    *,
    thread: str = "a",
    run: int = 1,
    module: str = "jit_step",
) -> Event:
    return Event(thread, module, name, run, start, end)


def test_a_loop_does_not_count_what_runs_inside_it() -> None:
    """Three levels on one thread; another thread does not matter. In any order."""
    events = [
        event("while", 0, 10),
        event("body", 1, 4),
        event("inner", 2, 3),
        event("body", 4, 9),
        event("after", 10, 12),
        event("aside", 0, 11, thread="b"),
    ]
    random.Random(5).shuffle(events)
    times: dict[str, float] = {}
    for found, seconds in self_times(events):
        times[found.instruction] = times.get(found.instruction, 0) + seconds
    assert times == {"while": 2, "body": 7, "inner": 1, "after": 2, "aside": 11}


def test_runs_gaps_and_other_modules() -> None:
    """Run 7 had begun before the trace. Runs 8 and 9 are 2 apart; another program runs between."""
    events = [
        event("x", 0, 1, run=7),
        event("x", 3, 5, run=8),
        event("y", 4, 6, run=8, thread="b"),
        event("z", 6.5, 7.5, run=3, module="jit_copy"),
        event("x", 8, 11, run=9),
    ]
    trace = summarise(events, "jit_step", last=2)
    assert trace.runs == 2 and trace.self_seconds == {"x": 5, "y": 2}
    assert (trace.other_seconds, trace.wall, trace.gap) == (1, 8, 2)
    assert trace.busy == 3 + 1 + 3 and trace.total == 8
    assert summarise(events, "jit_step").runs == 3
    with pytest.raises(HybridJaxError, match="no HLO operations and runs of jit_step"):
        summarise(events[3:4], "jit_step")


HLO = """HloModule jit_step, is_scheduled=true

%fused (param: f32[4]) -> f32[4] {
  %param = f32[4]{0} parameter(0)
  %exp.1 = f32[4]{0} exponential(%param), metadata={op_name="jit(step)/layer_0_full/ffn/exp"}
  ROOT %mul.2 = f32[4]{0} multiply(%exp.1, %exp.1), metadata={op_name="jit(step)/head/mul" id=3}
}

ENTRY %main (p: f32[4]) -> (f32[4], f32[4]) {
  %p = f32[4]{0} parameter(0)
  %named.1 = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/a/b"}
  %call.7 = f32[4]{0} call(%p), to_apply=%fused
  %copy.3 = f32[4]{0} copy(%call.7)
  ROOT %tuple = (f32[4]{0}, f32[4]{0}) tuple(%named.1, %copy.3)
}
"""


def test_names_of_instructions() -> None:
    names = op_names(HLO)
    assert names["named.1"] == "jit(step)/a/b"
    assert names["call.7"] == "jit(step)/head/mul"  # its root's
    assert names["exp.1"] == "jit(step)/layer_0_full/ffn/exp"
    assert names["copy.3"] == names["p"] == names["tuple"] == ""


PLACES = {
    "jit(step)/layer_3_linear/mixer/gated_delta_rule/while/body/dot": (
        3,
        "linear",
        "gated_delta_rule",
    ),
    "jit(step)/layer_3_linear/mixer/gated_delta_net/causal_conv1d/mul": (
        3,
        "linear",
        "gated_delta_net",
    ),
    "jit(step)/layer_12_window/mixer/dot_general": (12, "window", "mixer"),
    "jit(step)/layer_0_full/ffn/mul": (0, "full", "ffn"),
    "jit(step)/layer_0_full/add": (0, "full", "norms"),
    "jit(step)/head/dot_general": (None, "head", "head"),
    "jit(step)/prompt_logprobs/cond/head/dot": (None, "prompt_logprobs", "prompt_logprobs"),
    "jit(step)/scatter": (None, "rest of the step", "rest of the step"),
    "": (None, "unattributed", "unattributed"),
}


OPS = {"causal_conv1d", "gated_delta_net", "gated_delta_rule", "paged_attention"}


@pytest.mark.parametrize("name", PLACES)
def test_places(name: str) -> None:
    assert place_of(name, OPS) == PLACES[name]
