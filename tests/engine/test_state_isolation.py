"""Faults put into device memory: they end the one request they touch, and nobody notices else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.cache.arrays import PagedCache, StateCache, StateSlots
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request
from hybrid_jax.errors import NonFiniteLogits, StateOwnerMismatch
from hybrid_jax.specs import StateSpec, WindowSpec
from tests.helpers.engine_checks import Record, drive, greedy
from tests.helpers.real_engine import Rig, random_prompt

VICTIM = 1
GetRig = Callable[[str], Rig]


def requests_of(generation: int, lengths: tuple[int, ...] = (7, 18, 3)) -> list[Request]:
    return [
        Request(f"g{generation}-r{i}", random_prompt(n, generation), greedy(12))
        for i, n in enumerate(lengths)
    ]


def started(rig: Rig) -> tuple[Engine, list[Request], Record]:
    """An engine in mid-decode, without a step in flight."""
    engine, requests, record = rig.engine(run_ahead=False), requests_of(0), Record()
    for request in requests:
        engine.add_request(request)
    for _ in range(6):
        record.add(engine.step())
    return engine, requests, record


def victim(engine: Engine, requests: list[Request]) -> Any:
    (found,) = (s for s in engine._scheduler.running.values() if s.request is requests[VICTIM])
    assert found.is_decoding
    return found


def check_end(
    rig: Rig, engine: Engine, requests: list[Request], record: Record, error: type
) -> None:
    """The victim ended with `error`, its mates are right, and so are the next in its memory."""
    drive(engine, record=record)
    key = (requests[VICTIM].request_id, 0)
    assert record.ends[key].finish_reason == "error"
    assert isinstance(record.ends[key].error, error), record.ends[key].error
    expected = rig.oracle(requests[VICTIM].prompt_token_ids, 12)
    assert record.tokens[key] == expected[: len(record.tokens[key])] != []
    mates = [r for i, r in enumerate(requests) if i != VICTIM]
    rig.oracle.check(record, mates)
    rig.assert_clean(engine)
    later = requests_of(1, (1, 2, 9, 17, 5))
    for request in later:
        engine.add_request(request)
    rig.oracle.check(drive(engine), later)
    rig.assert_clean(engine)


@pytest.mark.parametrize("name", ["lara_mini", "qwen3_5"])
def test_a_wrong_owner_ends_its_sequence_only(name: str, rig: GetRig) -> None:
    rig_ = rig(name)
    engine, requests, record = started(rig_)
    (pair,) = (pair for pair in victim(engine, requests).slots if pair is not None)
    carry = rig_.runner._carry
    owners = (carry.owners[0].at[pair.read].set(99), *carry.owners[1:])
    rig_.runner._carry = replace(carry, owners=owners)
    check_end(rig_, engine, requests, record, StateOwnerMismatch)


def test_reading_the_slot_of_another_ends_the_reader_only(
    rig: GetRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig_ = rig("lara_mini")
    engine, requests, record = started(rig_)
    hurt, mate = victim(engine, requests), next(iter(engine._scheduler.running.values()))
    assert hurt is not mate
    step = rig_.runner.step

    def misread(batch: Any, sampling: Any) -> Any:
        tables = []
        for table in batch.tables:
            if isinstance(table, StateSlots):
                read = np.array(table.read)
                read[batch.row_ids == hurt.row] = table.read[batch.row_ids == mate.row]
                table = replace(table, read=read)
            tables.append(table)
        return step(replace(batch, tables=tuple(tables)), sampling)

    with monkeypatch.context() as patch:
        patch.setattr(rig_.runner, "step", misread)
        record.add(engine.step())
    check_end(rig_, engine, requests, record, StateOwnerMismatch)


def test_a_mismatch_in_an_unfinished_prefill_is_seen_too(rig: GetRig) -> None:
    """The second chunk of a prompt reads state, although it samples no token."""
    rig_ = rig("lara_mini")
    engine = rig_.engine(run_ahead=False)
    engine._scheduler.chunk_limit = lambda sequence, remaining: 4
    request, mate = requests_of(0, (18, 3))
    engine.add_request(request)
    engine.add_request(mate)
    record = Record()
    record.add(engine.step())
    carry = rig_.runner._carry
    sequence = next(iter(engine._scheduler.running.values()))
    assert not sequence.is_decoding
    (pair,) = (pair for pair in sequence.slots if pair is not None)
    owners = (carry.owners[0].at[pair.read].set(0), *carry.owners[1:])
    rig_.runner._carry = replace(carry, owners=owners)
    drive(engine, record=record)
    end = record.ends[(request.request_id, 0)]
    assert isinstance(end.error, StateOwnerMismatch)
    assert record.tokens[(request.request_id, 0)] == []
    rig_.oracle.check(record, [mate])
    rig_.assert_clean(engine)


@pytest.mark.parametrize("where", ["recurrent", "conv", "full", "window"])
def test_a_nan_ends_its_sequence_only(where: str, rig: GetRig) -> None:
    """One NaN in what one sequence remembers, in one layer."""
    rig_ = rig("lara_mini")
    engine, requests, record = started(rig_)
    sequence, groups = victim(engine, requests), rig_.runner.groups
    wanted = {"full": False, "window": True}
    index = next(
        i
        for i, group in enumerate(groups)
        if (isinstance(group.spec, StateSpec) and where not in wanted)
        or (
            where in wanted
            and isinstance(group.spec, WindowSpec) == wanted[where]
            and not isinstance(group.spec, StateSpec)
        )
    )
    carry, layer = rig_.runner._carry, groups[index].layers[0]
    cache = carry.caches[layer]
    if isinstance(cache, StateCache):
        slot = sequence.slots[index].read
        array = getattr(cache, where)
        last = (0,) * (array.ndim - 2)
        cache = replace(cache, **{where: array.at[(slot, -1, *last)].set(jnp.nan)})
    else:
        run = sequence.pages[index]
        offset = (sequence.num_computed_tokens - 1) % rig_.runner.config.page_size
        logical = (sequence.num_computed_tokens - 1) // rig_.runner.config.page_size
        page = run.ids[logical - run.first]
        cache = PagedCache(cache.pages.at[page, offset, 0, 0].set(jnp.nan))
    caches = (*carry.caches[:layer], cache, *carry.caches[layer + 1 :])
    rig_.runner._carry = replace(carry, caches=caches)
    check_end(rig_, engine, requests, record, NonFiniteLogits)
