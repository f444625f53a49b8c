"""The device suite: what an accelerator computes, and how fast.

`HYBRID_JAX_TEST_PLATFORM=cuda pytest -n 0 -m device` (or tpu). On a machine without an accelerator
its tests say that they did not run; with the platform cpu they do, which tries the suite itself.
"""

import os
from collections.abc import Callable

import jax
import pytest

_figures: list[str] = []


@pytest.fixture(autouse=True, scope="session")
def accelerator() -> None:
    """Skips the suite where there is none."""
    forced = os.environ.get("HYBRID_JAX_TEST_PLATFORM") == "cpu"
    if jax.default_backend() == "cpu" and not forced:
        pytest.skip(
            "no accelerator: set HYBRID_JAX_TEST_PLATFORM to cuda or tpu where there is one"
        )


@pytest.fixture
def figure() -> Callable[[str], None]:
    """Keeps a line for the end of the run."""
    return _figures.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        device = jax.local_devices()[0].device_kind
        terminalreporter.section(f"timings on {device}, jax {jax.__version__}")
        for line in _figures:
            terminalreporter.write_line(line)
