"""Interpreted kernels are large programs for XLA's CPU compiler, and run once or twice: it compiles
them in a hurry. What compiles for TPUs and GPUs is optimised (`tests.helpers.tpu.compile_on`).
"""

from collections.abc import Iterator

import pytest

from tests.helpers.compiler import hasty


@pytest.fixture(autouse=True, scope="module")
def hasty_compiler() -> Iterator[None]:
    with hasty(True):
        yield
