"""Selection of implementations: order, refusals, forced choices, report."""

import logging

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import platform
from pallas_kernels.registry import (
    ArrayFacts,
    Facts,
    Registry,
    forcing,
    never,
    partitioned,
    recording,
    select,
)


def run() -> str:
    return "ran"


def only_small(facts: Facts) -> str | None:
    return "x is wider than 8" if facts.values["x"].shape[-1] > 8 else None


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.register("op", "reference", run, never)  # asked last, whenever registered
    registry.register("op", "fast", run, only_small)
    return registry


def facts(width: int, device: str = "cpu") -> Facts:
    with platform.target(device, f"test {device}"):
        return Facts.of(x=jax.ShapeDtypeStruct((2, width), jnp.bfloat16), flag=True)


def test_facts_describe_arrays_and_device() -> None:
    value = facts(8, "tpu")
    assert (value.platform, value.device_kind) == ("tpu", "test tpu")
    assert value.values["x"] == ArrayFacts((2, 8), "bfloat16")
    assert value.values["flag"] is True
    assert hash(value) == hash(facts(8, "tpu")) and value != facts(9, "tpu")
    assert jax.jit(lambda x: len(Facts.of(x=x).values["x"].shape))(jnp.zeros((2, 3))) == 2
    with pytest.raises(TypeError):
        value.values["flag"] = False  # type: ignore[index]


def test_target_is_undone() -> None:
    before = platform.current()
    with pytest.raises(RuntimeError), platform.target("tpu", "TPU v9"):
        assert platform.current() == ("tpu", "TPU v9")
        raise RuntimeError
    assert platform.current() == before


def test_first_that_does_not_refuse_runs(registry: Registry) -> None:
    assert registry.implementations("op") == ("fast", "reference")
    assert registry.select("op", facts(8)).implementation == "fast"
    fallback = registry.select("op", facts(9))
    assert fallback.implementation == "reference" and fallback.fn() == "ran"
    assert fallback.refused == (("fast", "x is wider than 8"),)


def test_report_lists_each_choice_once(registry: Registry) -> None:
    for width in (8, 9, 8):
        registry.select("op", facts(width))
    registry.select("op", facts(8), forced="reference")
    chosen = [(s.implementation, s.forced) for s in registry.report()]
    assert chosen == [("fast", False), ("reference", False), ("reference", True)]


def test_forced_choices(registry: Registry) -> None:
    assert registry.select("op", facts(8), forced="fast").implementation == "fast"
    with pytest.raises(
        ValueError,
        match="fast cannot run on .*: x is wider than 8; force another",
    ):
        registry.select("op", facts(9), forced="fast")
    with pytest.raises(ValueError, match="unknown implementation 'slow'; known: fast, reference"):
        registry.select("op", facts(8), forced="slow")
    with pytest.raises(ValueError, match="unknown op 'other'; known: op"):
        registry.select("other", facts(8))
    assert [s.implementation for s in registry.report()] == ["fast"]  # refusals choose nothing


def test_nothing_can_run() -> None:
    registry = Registry()
    registry.register("op", "fast", run, only_small)
    with pytest.raises(ValueError, match="no implementation can run on test gpu: fast: x is wider"):
        registry.select("op", facts(9, "gpu"))


def test_duplicates_are_refused(registry: Registry) -> None:
    with pytest.raises(ValueError, match="'fast' is already registered"):
        registry.register("op", "fast", run, never)


def test_a_kernel_is_imported_on_its_own_platform_only(registry: Registry) -> None:
    """`json:dumps` stands for the kernel: a module without `refuses`, as the import would show."""
    registry.register_kernel("op", "kernel", "tpu", "json:dumps")
    assert registry.implementations("op") == ("fast", "kernel", "reference")
    assert registry.implementations("op", "gpu") == ("fast", "reference")
    assert registry.select("op", facts(9, "gpu")).refused == (("fast", "x is wider than 8"),)
    with pytest.raises(ValueError, match="kernel cannot run on test gpu: is for tpu, not for gpu"):
        registry.select("op", facts(8, "gpu"), forced="kernel")
    with pytest.raises(AttributeError, match="refuses"):
        registry.select("op", facts(9, "tpu"))


@pytest.mark.parametrize("device", ["tpu", "gpu"])
def test_fallback_on_an_accelerator_is_logged(
    registry: Registry, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        registry.select("op", facts(9, "cpu"))
        registry.select("op", facts(8, device))
        registry.select("op", facts(9, device), forced="reference")
        assert not caplog.records
        registry.select("op", facts(9, device))
        registry.select("op", facts(9, device))  # the same choice is not logged again
    (record,) = caplog.records
    assert f"op runs the slow reference on test {device}" in record.message
    assert "fast: x is wider than 8" in record.message


def test_ops_made_of_other_ops_are_no_fallback(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.register("whole", "reference", run, never, composed=True)
    with caplog.at_level(logging.WARNING):
        assert registry.select("whole", facts(9, "gpu")).implementation == "reference"
    assert not caplog.records


def test_an_accelerator_without_a_kernel_has_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    """The kernels are for others; what they fuse runs apart."""
    own = Registry()
    own.register_kernel("op", "kernel", "tpu", "json:dumps", fuses=("one", "other"))
    own.register("op", "reference", run, never, composed=True)
    own.register_kernel("alone", "kernel", "tpu", "json:dumps")
    own.register("alone", "reference", run, never)
    reason = "is for tpu, not for gpu"
    fused = f"{reason}, where one and other choose for themselves"
    assert own.select("op", facts(9, "gpu")).refused == (("kernel", fused),)
    assert not caplog.records
    assert own.select("alone", facts(9, "gpu")).refused == (("kernel", reason),)
    assert f"alone runs the slow reference on test gpu (kernel: {reason})" in caplog.text
    for op in ("op", "alone"):
        assert own.select(op, facts(9, "cpu")).refused == ()
        assert own.select(op, facts(9, "gpu"), forced="reference").refused == ()


def test_kernels_refuse_code_that_is_cut_over_devices() -> None:
    own = Registry()
    own.register("op", "kernel", lambda: None, never)
    own.register("op", "reference", lambda: None, never)
    assert own.select("op", Facts.of()).implementation == "kernel"
    with partitioned(True):
        choice = own.select("op", Facts.of())
        assert choice.implementation == "reference"
        assert "several devices" in choice.refused[0][1]
        with pytest.raises(ValueError, match="several devices"):
            own.select("op", Facts.of(), forced="kernel")


def test_forcing_names_an_op_that_exists_and_is_undone() -> None:
    from pallas_kernels.causal_conv1d import api

    with forcing({api.OP: "triton_gpu"}):
        with (
            forcing({"rows": "reference"}),
            pytest.raises(ValueError, match="force another one of"),
        ):
            select(api.OP, facts(8))
        with forcing({api.OP: "reference"}):
            assert select(api.OP, facts(8)).forced
    assert not select(api.OP, facts(8)).forced
    for name in ("nonsense", ""):
        with pytest.raises(ValueError, match=f"unknown implementation '{name}'"):
            forcing({api.OP: name}).__enter__()
        with pytest.raises(ValueError, match=f"unknown implementation '{name}'"):
            select(api.OP, facts(8), name)
    with pytest.raises(ValueError, match="unknown op 'other'; known: .*causal_conv1d"):
        forcing({"other": "some"}).__enter__()


def test_a_fused_kernel_makes_way_for_a_forced_part(registry: Registry) -> None:
    registry.register_kernel("whole", "fused", "tpu", f"{__name__}:fused", fuses=("rows",))
    registry.register("whole", "reference", lambda: None, never)
    with platform.target("tpu", "test tpu"):
        assert registry.select("whole", Facts.of()).implementation == "fused"
        with forcing({"rows": "reference"}):
            choice = registry.select("whole", Facts.of())
            assert choice.implementation == "reference"
            reason = "does rows itself, which is forced to be reference"
            assert choice.refused == (("fused", reason),)
            with pytest.raises(ValueError, match="does rows itself"):
                registry.select("whole", Facts.of(), "fused")


def fused() -> None:
    """Found by name."""


refuses = never


def test_recording_counts_choices_and_keeps_them_out_of_the_report(registry: Registry) -> None:
    registry.select("op", facts(8))
    with recording() as choices:
        for width in (9, 9, 8):
            registry.select("op", facts(width))
    assert [choice.implementation for choice in choices] == ["reference", "reference", "fast"]
    assert choices[0] == choices[1] and choices[0].refused == (("fast", "x is wider than 8"),)
    assert [choice.facts for choice in registry.report()] == [facts(8)]
    registry.select("op", facts(9))
    assert len(registry.report()) == 2
