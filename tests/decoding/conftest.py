"""One workspace per tiny checkpoint, so that each step compiles once."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybrid_jax.decoding import Workspace
from hybrid_jax.loading import LoadedModel, load_model
from tests.helpers import tiny
from tests.helpers.real_engine import CHUNK, MAX_LEN, PAGE, Oracle

GetWorkspace = Callable[[str], Workspace]
OPTIONS = {
    "max_num_seqs": 5,
    "max_model_len": MAX_LEN,
    "max_num_batched_tokens": 2 * CHUNK,
    "page_size": PAGE,
    "row_buckets": (5,),
    "token_buckets": (2 * CHUNK,),
    "max_logprobs": 0,
    "max_logit_bias": 2,
    "num_checkpoints": 30,
    "cache_bytes": 2**30,
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    """`models(name)`: a tiny checkpoint in float32."""
    known: dict[str, LoadedModel] = {}

    def get(name: str) -> LoadedModel:
        if name not in known:
            directory: Path = tmp_path_factory.mktemp("model")
            known[name] = load_model(tiny.write_checkpoint(name, directory, 0), dtype="float32")
        return known[name]

    return get


@pytest.fixture(scope="session")
def oracles(models: Callable[[str], LoadedModel]) -> Callable[[str], Oracle]:
    """`oracles(name)(prompt, count)`: greedy continuations without any cache."""
    known: dict[str, Oracle] = {}
    return lambda name: known.setdefault(name, Oracle(models(name)))


@pytest.fixture(scope="session")
def _workspaces() -> dict[str, Workspace]:
    return {}


@pytest.fixture
def workspace(
    models: Callable[[str], LoadedModel], _workspaces: dict[str, Workspace]
) -> Iterator[GetWorkspace]:
    """`workspace(name)`: its workspace, all memory NaN; after the test nothing may be held."""
    used: list[Workspace] = []

    def get(name: str) -> Workspace:
        if name not in _workspaces:
            _workspaces[name] = Workspace(models(name), **OPTIONS)
        found = _workspaces[name]
        if found not in used:
            used.append(found)
            poison(found)
        return found

    yield get
    gc.collect()
    for found in used:
        for pool in found.memory.pools:
            pool.check_integrity({})


def poison(workspace: Workspace) -> None:
    """Fills all pages and slots, the null ones included, with NaN."""
    for group, pool in enumerate(workspace.memory.pools):
        assert not pool.num_used
        workspace.runner.fill(group, range(pool.size), float("nan"))
