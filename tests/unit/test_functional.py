"""The example of `hybrid_jax.functional` runs as it stands."""

import doctest

from hybrid_jax import functional


def test_the_docstring_example() -> None:
    result = doctest.testmod(functional)
    assert result.attempted > 10
    assert result.failed == 0
