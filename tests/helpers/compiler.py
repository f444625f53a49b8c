"""How much XLA optimises."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

_OPTION = "jax_disable_most_optimizations"


@contextmanager
def hasty(value: bool) -> Iterator[None]:
    """Whether XLA spends little on what it compiles meanwhile."""
    before = jax.config.read(_OPTION)
    jax.config.update(_OPTION, value)
    try:
        yield
    finally:
        jax.config.update(_OPTION, before)
