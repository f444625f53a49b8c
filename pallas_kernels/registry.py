"""Chooses the implementation of an op from static facts, and remembers every choice and refusal.

There is no silent fallback: a forced choice that cannot run is an error, and running the reference
on an accelerator is logged with the reason why each kernel refused.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels import platform as platform_

REFERENCE = "reference"

logger = logging.getLogger(__name__)

_partitioned: ContextVar[bool] = ContextVar("partitioned", default=False)
_forced: ContextVar[Mapping[str, str]] = ContextVar("forced", default=MappingProxyType({}))
_recorder: ContextVar["list[Selection] | None"] = ContextVar("recorder", default=None)


class ArrayFacts(NamedTuple):
    """Shape and dtype name of an operand."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Facts:
    """What is known about a call while tracing: the device, operand shapes and static options."""

    platform: str
    device_kind: str
    items: tuple[tuple[str, Hashable], ...]
    partitioned: bool = False  # XLA will cut the traced code over several devices

    @classmethod
    def of(cls, **values: Any) -> "Facts":
        """Facts for the current device. Arrays become `ArrayFacts`, other values stay."""
        device = platform_.current()
        described = {
            name: ArrayFacts(tuple(value.shape), str(value.dtype))
            if isinstance(value, (jax.Array, jax.ShapeDtypeStruct, np.ndarray))
            else value
            for name, value in values.items()
        }
        items = tuple(sorted(described.items()))
        return cls(device.platform, device.kind, items, _partitioned.get())

    @property
    def values(self) -> Mapping[str, Any]:
        """The operands and options by name, read-only."""
        return MappingProxyType(dict(self.items))


@dataclass(frozen=True)
class Selection:
    """One choice: what runs, for which facts, and why the better-ranked implementations do not."""

    op: str
    facts: Facts
    implementation: str
    fn: Callable[..., Any]
    refused: tuple[tuple[str, str], ...]  # (implementation, reason), in the order asked
    forced: bool = False


@dataclass(frozen=True)
class _Entry:
    fn: Callable[..., Any]
    refuses: Callable[[Facts], str | None]


@dataclass
class Registry:
    """Implementations per op. The module's functions use one shared instance."""

    _entries: dict[str, dict[str, _Entry]] = field(default_factory=dict)
    _selections: dict[Selection, None] = field(default_factory=dict)  # an ordered set

    def register(
        self,
        op: str,
        implementation: str,
        fn: Callable[..., Any],
        refuses: Callable[[Facts], str | None],
    ) -> None:
        """Adds an implementation. `refuses` gives the reason why it cannot run, or None if it can.

        Implementations are asked in the order of registration, the reference last. What they trace
        lies in a named scope of the op's name, for profiles.
        """
        entries = self._entries.setdefault(op, {})
        if implementation in entries:
            raise ValueError(f"{op}: implementation {implementation!r} is already registered")
        entries[implementation] = _Entry(jax.named_scope(op)(fn), refuses)

    def implementations(self, op: str) -> tuple[str, ...]:
        """Names in the order asked, the reference last."""
        if op not in self._entries:
            raise ValueError(f"unknown op {op!r}; known: {', '.join(sorted(self._entries))}")
        return tuple(sorted(self._entries[op], key=lambda name: name == REFERENCE))

    def select(self, op: str, facts: Facts, forced: str | None = None) -> Selection:
        """The first implementation that does not refuse `facts`, or the one forced, here or around.

        Raises:
            ValueError: unknown op or name, or no candidate can run; the message has the reasons.
        """
        names = self.implementations(op)
        forced = forced or _forced.get().get(op)
        if forced is not None and forced not in names:
            raise ValueError(f"{op}: unknown implementation {forced!r}; known: {', '.join(names)}")
        refused: list[tuple[str, str]] = []
        for name in names if forced is None else (forced,):
            entry = self._entries[op][name]
            if facts.partitioned and name != REFERENCE:
                reason = "XLA cannot cut a kernel over several devices"
            else:
                reason = entry.refuses(facts)
            if reason is None:
                selection = Selection(op, facts, name, entry.fn, tuple(refused), forced is not None)
                self._record(selection)
                return selection
            refused.append((name, reason))
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
        raise ValueError(f"{op}: no implementation can run on {facts.device_kind}: {reasons}")

    def report(self) -> tuple[Selection, ...]:
        """Every distinct choice made so far, oldest first."""
        return tuple(self._selections)

    def _record(self, selection: Selection) -> None:
        recorder = _recorder.get()
        if recorder is not None:
            recorder.append(selection)
            return
        if selection in self._selections:
            return
        self._selections[selection] = None
        fallback = selection.implementation == REFERENCE and not selection.forced
        if fallback and selection.facts.platform != "cpu":
            reasons = "; ".join(f"{name}: {reason}" for name, reason in selection.refused)
            logger.warning(
                "%s runs the slow reference on %s (%s)",
                selection.op,
                selection.facts.device_kind,
                reasons or "no kernel is registered for this op",
            )


@contextmanager
def partitioned(active: bool) -> Iterator[None]:
    """States, while tracing, whether XLA will cut the code over several devices."""
    token = _partitioned.set(active)
    try:
        yield
    finally:
        _partitioned.reset(token)


@contextmanager
def forcing(choices: Mapping[str, str]) -> Iterator[None]:
    """Forces, while tracing, the implementation of the ops that `choices` names.

    Raises:
        ValueError: an op is unknown.
    """
    for op in choices:
        implementations(op)
    token = _forced.set(choices)
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def recording() -> Iterator[list[Selection]]:
    """Collects every choice made within, repeated ones too, and keeps them out of `report`."""
    choices: list[Selection] = []
    token = _recorder.set(choices)
    try:
        yield choices
    finally:
        _recorder.reset(token)


def forced(op: str) -> str | None:
    """The implementation that `forcing` demands for `op`, if any."""
    return _forced.get().get(op)


_registry = Registry()
register = _registry.register
implementations = _registry.implementations
select = _registry.select
report = _registry.report


def never(facts: Facts) -> str | None:
    """The `refuses` of an implementation that runs everywhere."""
    del facts
    return None
