"""A profile of a real engine finds what a layer was made to waste time on."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hybrid_jax.layers.mixers.attention import Attention
from hybrid_jax.measure import PhaseProfile, measure_profile
from tests.helpers import tiny

ROWS, PROMPT, STEPS = 2, 8, 3


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> tuple[PhaseProfile, PhaseProfile]:
    """A model of one window, one linear and one full layer, whose window layer is made slow."""
    model = tiny.write_checkpoint("lara_mini-untied", tmp_path_factory.mktemp("model"), seed=0)
    call = Attention.__call__

    def slow(self: Attention, x: jax.Array, *others: Any) -> Any:
        out, cache = call(self, x, *others)
        if self.spec.window is None:
            return out, cache
        start = jnp.full((400, 400), x[0, 0], jnp.float32)
        waste = jax.lax.fori_loop(0, 10, lambda _, y: jnp.tanh(y @ y), start)
        return out + 1e-6 * waste[0, 0].astype(out.dtype), cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attention, "__call__", slow)
        return measure_profile(
            model,
            rows=ROWS,
            prompt_tokens=PROMPT,
            steps=STEPS,
            max_logprobs=0,
            max_logit_bias=0,
        )


def test_the_slow_layer_is_found(phases: tuple[PhaseProfile, PhaseProfile]) -> None:
    """Ten products of 400 x 400 take far longer than all of a model of width 64."""
    for phase in phases:
        assert phase.by("layer", "kind", "op")[0, "window", "mixer"].time > 0.5
        assert next(iter(phase.by("layer"))) == (0,)
        work = phase.by("layer", "kind", "op")[0, "window", "mixer"]
        assert work.flops < 0.3 and work.nbytes < 0.3  # nobody told the formulas


def test_shares_add_up_and_nothing_is_hidden(phases: tuple[PhaseProfile, PhaseProfile]) -> None:
    prefill, decode = phases
    assert (prefill.phase, prefill.rows, prefill.tokens) == ("prefill", ROWS, ROWS * PROMPT)
    assert (decode.phase, decode.rows, decode.tokens) == ("decode", ROWS, ROWS)
    assert decode.steps == STEPS
    for phase in phases:
        for fields in (("layer",), ("kind",), ("op",), ("kind", "op")):
            shares = phase.by(*fields).values()  # type: ignore[arg-type]
            for name in ("time", "flops", "nbytes"):
                assert sum(getattr(share, name) for share in shares) == pytest.approx(1)
            assert sum(share.seconds for share in shares) == pytest.approx(phase.op_seconds)
        kinds = {kind for (kind,) in phase.by("kind")}
        assert kinds >= {"window", "linear", "full", "head", "unattributed", "other programs"}
        ops = {(kind, op) for kind, op in phase.by("kind", "op") if kind == "linear"}
        assert ops == {("linear", op) for op in ("mixer", "ffn", "norms", "gated_delta_net")}
        assert 0 < phase.busy_seconds <= phase.seconds
        assert 0 <= phase.gap_seconds <= phase.seconds * phase.steps
        assert phase.host_seconds.keys() == {"launch", "wait", "output"}


def test_what_the_profile_needs_is_refused_when_it_is_not_there(tmp_path: Path) -> None:
    for name in ("rows", "prompt_tokens", "steps"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            measure_profile(tmp_path, **{name: 0})
