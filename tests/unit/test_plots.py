"""Figures hold the numbers they claim to; what they look like is not tested."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_jax import plots
from hybrid_jax.cache.chips import GIB, find_chip
from hybrid_jax.config import EngineConfig
from hybrid_jax.measure import Throughput
from hybrid_jax.measure.profile import PhaseProfile, ProfileLine
from hybrid_jax.memory.plan import MemoryPlan, plan_memory
from hybrid_jax.models import config_from_hf
from tests.helpers import tiny


@pytest.fixture(scope="module")
def plan() -> MemoryPlan:
    return plan_memory(
        config_from_hf(tiny.TINY["lara_mini-untied"]),
        EngineConfig(max_num_seqs=3, max_model_len=256, page_size=8),
        "bfloat16",
        chip=find_chip("v5e"),
        temporaries_from="estimate",
    )


def test_the_memory_plan_is_stacked_by_class(plan: MemoryPlan) -> None:
    """At the plan's own length the layers of the stack are the plan's lines, to the byte."""
    axes = plots.memory_plan(plan, [64, 256, 1024]).axes[0]
    lines = plan.lines()
    assert [c.get_label() for c in axes.collections] == [line.name for line in lines]
    below = 0.0
    for collection, line in zip(axes.collections, lines, strict=True):
        vertices = collection.get_paths()[0].vertices
        heights = vertices[vertices[:, 0] == 256][:, 1]
        assert heights.min() == pytest.approx(below, rel=1e-12, abs=1e-15)
        below += line.nbytes / GIB
        assert heights.max() == pytest.approx(below, rel=1e-12)
    assert below * GIB == pytest.approx(plan.total)


def test_only_what_grows_with_the_context_grows(plan: MemoryPlan) -> None:
    short, long = ({line.name: line.nbytes for line in plan.at(n).lines()} for n in (1024, 2048))
    grows = {name for name in short if long[name] > short[name]}
    assert grows == {next(name for name in short if name.startswith("full")), "rows"}
    assert plan.at(plan.config.max_model_len).lines() == plan.lines()


def throughput_of(batch: int) -> Throughput:
    return Throughput(batch, 8, 2.0, 100, 30 * batch, 0, 5, 0, {}, {})


def test_throughput_against_batch() -> None:
    axes = plots.throughput([throughput_of(4), throughput_of(1)]).axes[0]
    series = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert series == {"output": [[1, 15], [4, 60]], "prompt": [[1, 50], [4, 50]]}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_times_of_layers_beside_their_work(phase: Any) -> None:
    lines = (
        ProfileLine(0, "linear", "mixer", 0.001, 1.0, 3.0),
        ProfileLine(0, "linear", "ffn", 0.002, 1.0, 0.0),
        ProfileLine(1, "full", "ffn", 0.004, 2.0, 1.0),
        ProfileLine(None, "head", "head", 0.009, 4.0, 4.0),
    )
    profile = PhaseProfile(phase, 1, 1, 1, lines, 1.0, 1.0, 0.0, {})
    axes = plots.layer_times(profile).axes[0]
    bars = {
        c.get_label(): [(b.get_center()[0], b.get_height()) for b in c] for c in axes.containers
    }
    expected = {"linear": [(0, 3)], "full": [(1, 4)], "outside of the layers": [(2, 9)]}
    assert {name: np.round(some, 9).tolist() for name, some in bars.items()} == {
        name: [list(map(float, bar)) for bar in some] for name, some in expected.items()
    }
    work = {"prefill": [4, 4, 8], "decode": [6, 2, 8]}[phase]  # of 16 ms, by 8 units of work
    np.testing.assert_allclose(axes.lines[0].get_ydata(), work)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "head"]


def test_state_norms_over_steps() -> None:
    axes = plots.state_norms({0: [1.0, 2.0, 4.0], 3: [5.0, 5.0, 5.0]}).axes[0]
    series = {line.get_label(): line.get_xydata() for line in axes.lines}
    np.testing.assert_array_equal(series["layer 0"], [[1, 1], [2, 2], [3, 4]])
    np.testing.assert_array_equal(series["layer 3"], [[1, 5], [2, 5], [3, 5]])


def test_a_figure_is_written_and_nothing_global_is_touched(
    tmp_path: Path, plan: MemoryPlan
) -> None:
    path = tmp_path / "plan.png"
    plots.memory_plan(plan).savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    assert "matplotlib.pyplot" not in sys.modules


def test_a_plot_that_could_not_be_written_is_refused_before(tmp_path: Path) -> None:
    plots.check_path(None)
    plots.check_path(tmp_path / "a.svg")
    with pytest.raises(ValueError, match="'a.jpg' is no png, pdf, svg file"):
        plots.check_path(Path("a.jpg"))
    with pytest.raises(ValueError, match="no directory"):
        plots.check_path(tmp_path / "missing" / "a.png")


def test_without_matplotlib_the_error_says_what_to_install() -> None:
    code = "import sys\nsys.modules['matplotlib'] = None\nfrom hybrid_jax import plots\n"
    code += "try:\n    plots.state_norms({})\nexcept Exception as error:\n    print(repr(error))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("HybridJaxError") and "hybrid-jax[plots]" in done.stdout
