"""Fixtures of the tests with real models."""

from collections.abc import Callable

import pytest

from tests.helpers.real_engine import Rig


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rig]:
    """`rig(name)`: the one rig of a tiny checkpoint in this session."""
    rigs: dict[str, Rig] = {}

    def get(name: str) -> Rig:
        if name not in rigs:
            rigs[name] = Rig(name, tmp_path_factory.mktemp("rig"))
        return rigs[name]

    return get
