"""The bench of the ops: every case can be called, and times are what the clock said."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_kernels import bench, registry
from pallas_kernels.bench_operands import OPS, Batch, call_bytes, cases_of, make_call
from pallas_kernels.rows import reference


def test_every_op_has_operands() -> None:
    folders = Path(bench.__file__).parent.iterdir()
    assert set(OPS) == {path.name for path in folders if (path / "api.py").exists()}


@pytest.mark.parametrize("batch", [Batch(3, 20, 1), Batch(1, 0, 9)], ids=["decode", "prefill"])
@pytest.mark.parametrize("op", OPS)
def test_every_case_is_a_call_that_the_op_accepts(op: str, batch: Batch) -> None:
    """By shapes; the smallest case also by values, which are finite."""
    cases = cases_of(op)
    for case in cases:
        if op == "rows" and case.name != "tiny":
            continue  # pools of gigabytes
        call = make_call(op, case, batch)
        _, pool = jax.eval_shape(call.run, call.pool, **call.operands)
        assert jax.tree.map(described, pool) == jax.tree.map(described, call.pool)
    call = make_call(op, cases[0], batch)
    out, pool = jax.jit(call.run)(call.pool, **call.operands)
    assert op == "rows" or np.isfinite(np.asarray(out)).all()
    pools = zip(jax.tree.leaves(pool), jax.tree.leaves(call.pool), strict=True)
    assert not any(np.array_equal(after, before) for after, before in pools)  # all were updated


@pytest.mark.parametrize("op", OPS)
def test_operands_may_be_numpys(op: str) -> None:
    call = make_call(op, cases_of(op)[0], Batch(1, 0, 3))
    pool, operands = jax.tree.map(np.asarray, (call.pool, call.operands))
    given = call.run(call.pool, **call.operands), call.run(pool, **operands)
    for expected, found in zip(*map(jax.tree.leaves, given), strict=True):
        assert isinstance(found, jax.Array)
        np.testing.assert_array_equal(found, expected)


def described(pool: jax.Array | jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], str]:
    return pool.shape, str(pool.dtype)


@pytest.mark.parametrize("batch", [Batch(3, 20, 1), Batch(1, 0, 9)], ids=["decode", "prefill"])
@pytest.mark.parametrize("op", OPS)
def test_bytes_are_known_before_anything_is_made(op: str, batch: Batch) -> None:
    case = cases_of(op)[0]
    call = make_call(op, case, batch)
    made = jax.tree.leaves((call.pool, call.operands))
    assert call_bytes(op, case, batch) == sum(array.nbytes for array in made)


def test_operands_are_the_same_for_the_same_seed() -> None:
    case, batch = cases_of("gla")[0], Batch(2, 3, 1)
    one, same, other = (make_call("gla", case, batch, seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one.operands["v"], same.operands["v"])
    assert not np.array_equal(one.operands["v"], other.operands["v"])


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rows` with a second implementation and one that cannot run here, and no others."""
    entries = {
        "again": registry._Entry(lambda: (reference.write, registry.never)),
        "elsewhere": registry._Entry(lambda: (reference.write, lambda facts: "is for Mars")),
        registry.REFERENCE: registry._Entry(lambda: (reference.write, registry.never)),
    }
    monkeypatch.setitem(registry._registry._entries, "rows", entries)


def ticking(seconds: float) -> Callable[[], float]:
    return (seconds * n for n in itertools.count()).__next__


def test_times_by_a_known_clock(double: None) -> None:
    """A sample of so many calls takes one tick of 5 ms: 4 calls in 20 ms, 1.25 ms each."""
    timings = bench.time_op("rows", cases=["tiny"], rounds=3, clock=ticking(0.005))
    found = {timing.implementation: timing for timing in timings}
    assert found.keys() == {"again", "elsewhere", "reference"}
    for name in ("again", "reference"):
        assert found[name].seconds == pytest.approx([0.00125] * 3)
        assert found[name].ratio == pytest.approx(1) and found[name].refused is None
        assert found[name].to_dict()["range"] == pytest.approx((0.00125, 0.00125))
    assert [name for name in found if found[name].chosen] == ["again"]
    assert "is for Mars" in (found["elsewhere"].refused or "")
    assert found["elsewhere"].seconds == () and found["elsewhere"].ratio is None
    assert "is for Mars" in str(bench.timing_lines(timings))


def test_what_is_unknown_is_refused() -> None:
    for op, options, message in (
        ("frob", {}, "unknown op 'frob'; known: causal_conv1d"),
        ("gla", {"cases": ["frob"]}, "gla has no case 'frob'; known: tiny"),
        ("gla", {"rows": 0}, "rows must be at least 1, got 0"),
        ("gla", {"tokens": 1}, "tokens must be at least 2, got 1"),
        ("gla", {"rounds": 0}, "rounds must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            bench.time_op(op, **options)  # type: ignore[arg-type]


def test_the_module_is_a_command() -> None:
    command = [sys.executable, "-m", "pallas_kernels.bench"]
    options = ["causal_conv1d", "--case", "tiny", "--tokens", "5", "--rounds", "1", "--json", "-"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    timings = json.loads(done.stdout)["timings"]
    assert [t["batch"]["new"] for t in timings] == [1, 5]
    assert all(t["median"] > 0 and t["implementation"] == "reference" for t in timings)
    done = subprocess.run([*command, "frob"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "unknown op" in done.stderr
    late = [*command, "gla", "--json", "none/figures.json"]
    done = subprocess.run(late, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "is no file in" in done.stderr
