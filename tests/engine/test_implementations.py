"""`EngineConfig.implementations`: what shall run an op runs it, or the engine does not start."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.runtime.runner import Runner
from pallas_kernels import registry
from pallas_kernels.paged_attention import reference
from tests.helpers.engine_checks import drive, greedy
from tests.helpers.real_engine import CHUNK, ROWS, Rig, engine_config, random_prompt

OP = "paged_attention"


@pytest.fixture
def calls() -> Iterator[list[bool]]:
    """An implementation "counted", which only works for decode rows: whether each call was such."""
    made: list[bool] = []

    def counted(*arguments: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        made.append(arguments[5].decode_only)
        return reference.paged_attention(*arguments, **options)

    registry.register(OP, "counted", counted, registry.never)
    yield made
    del registry._registry._entries[OP]["counted"]


def make_engine(rig: Rig, **implementations: str) -> Engine:
    config = engine_config(implementations=implementations)
    return Engine(Runner(rig.model, config), None)


def test_the_named_implementation_runs_in_every_bucket(
    rig: Callable[[str], Rig], calls: list[bool]
) -> None:
    rig_ = rig("lara_mini")
    layers = 3  # with attention
    make_engine(rig_, paged_attention="reference")
    assert calls == []
    engine = make_engine(rig_, paged_attention="counted")
    assert sorted(calls) == [False] * layers + [True] * layers  # traced for both, at once
    prompt = random_prompt(5, 0)
    engine.add_request(Request("a", prompt, greedy(4)))
    record = drive(engine)
    assert record.tokens["a", 0] == rig_.oracle(prompt, 4)
    assert len(calls) == 4 * layers  # and in the compiled steps
    chosen = [s for s in registry.report() if s.op == OP and s.implementation == "counted"]
    assert all(s.forced for s in chosen)
    tokens = {s.facts.values["q"].shape[0] for s in chosen}
    assert tokens == {CHUNK, ROWS}


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({OP: "mosaic_tpu"}, "paged_attention: mosaic_tpu cannot run on cpu: is for tpu"),
        ({OP: "frob"}, "paged_attention: unknown implementation 'frob'; known: .*reference"),
        ({"frob": "reference"}, "unknown op 'frob'; known: .*paged_attention"),
    ],
)
def test_what_cannot_run_is_refused_when_the_engine_is_made(
    choice: dict[str, str], words: str, rig: Callable[[str], Rig]
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        make_engine(rig("lara_mini"), **choice)
    assert "\n" not in str(caught.value)
