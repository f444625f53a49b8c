"""The example of `hybrid_jax.decoding` runs as it stands."""

import doctest

import pytest

from hybrid_jax import decoding


@pytest.mark.slow
def test_the_docstring_example() -> None:
    result = doctest.testmod(decoding)
    assert result.attempted > 10
    assert result.failed == 0
