"""Chooses the implementation of an op from static facts, and remembers every choice and refusal.

There is no silent fallback: a forced choice that cannot run is an error, and running the reference
on an accelerator is logged with the reason why each kernel refused.
"""

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
    fn: Callable[..., Any] = field(compare=False)
    refused: tuple[tuple[str, str], ...]  # (implementation, reason), in the order asked
    forced: bool = False


Loaded = tuple[Callable[..., Any], Callable[[Facts], str | None]]  # the function, its `refuses`


def _called(op: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """What is traced lies in a scope of the op's name; arrays of numpy become JAX's."""

    def array(x: Any) -> Any:
        return jnp.asarray(x) if isinstance(x, np.ndarray) else x

    @functools.wraps(fn)
    def run(*arguments: Any, **options: Any) -> Any:
        with jax.named_scope(op):
            return fn(*jax.tree.map(array, arguments), **jax.tree.map(array, options))

    return run


@dataclass(frozen=True)
class _Entry:
    load: Callable[[], Loaded]
    platform: str | None = None  # the only one it is for; None: any
    composed: bool = False  # of ops that choose, and report, for themselves
    fuses: tuple[str, ...] = ()  # ops that it does itself

    def elsewhere(self, platform: str, *, apart: bool = False) -> str:
        """Why it cannot run on another platform; with `apart` also what runs there instead."""
        parts = " and ".join(self.fuses) if apart else ""
        where = f", where {parts} choose for themselves" if parts else ""
        return f"is for {self.platform}, not for {platform}{where}"


@dataclass
class Registry:
    """Implementations per op. The module's functions use one shared instance.

    `discover` registers ops that nobody has used yet; it is called when an op is unknown.
    """

    discover: Callable[[], None] = lambda: None
    _entries: dict[str, dict[str, _Entry]] = field(default_factory=dict)
    _selections: dict[Selection, None] = field(default_factory=dict)  # an ordered set

    def register(
        self,
        op: str,
        implementation: str,
        fn: Callable[..., Any],
        refuses: Callable[[Facts], str | None],
        *,
        composed: bool = False,
    ) -> None:
        """Adds an implementation. `refuses` gives the reason why it cannot run, or None if it can.

        Implementations are asked in the order of registration, the reference last. What they trace
        lies in a named scope of the op's name, for profiles. `composed`: it calls other ops, which
        choose implementations of their own; so running it is no fallback to plain JAX.
        """
        loaded = _called(op, fn), refuses
        self._add(op, implementation, _Entry(lambda: loaded, composed=composed))

    def register_kernel(
        self,
        op: str,
        implementation: str,
        platform: str,
        function: str,
        *,
        fuses: Sequence[str] = (),
    ) -> None:
        """Adds an implementation for one platform only, which no other pays the import of.

        Args:
            op: as for `register`.
            implementation: as for `register`.
            platform: tpu or gpu.
            function: "module:function"; the module has the `refuses` of the function beside it.
            fuses: ops that it does itself: it refuses while one of them is forced.
        """
        module_name, _, name = function.partition(":")

        @functools.cache
        def load() -> Loaded:
            module = importlib.import_module(module_name)
            return _called(op, getattr(module, name)), module.refuses

        self._add(op, implementation, _Entry(load, platform, fuses=tuple(fuses)))

    def _add(self, op: str, implementation: str, entry: _Entry) -> None:
        entries = self._entries.setdefault(op, {})
        if implementation in entries:
            raise ValueError(f"{op}: implementation {implementation!r} is already registered")
        entries[implementation] = entry

    def implementations(self, op: str, platform: str | None = None) -> tuple[str, ...]:
        """Names in the order asked, the reference last: all of them, or those for a platform.

        Raises:
            ValueError: unknown op.
        """
        if op not in self._entries:
            self.discover()
        if op not in self._entries:
            raise ValueError(f"unknown op {op!r}; known: {', '.join(sorted(self._entries))}")
        entries = self._entries[op]
        usable = (n for n in entries if not platform or entries[n].platform in (None, platform))
        return tuple(sorted(usable, key=lambda name: name == REFERENCE))

    def check(self, op: str, implementation: str) -> None:
        """Raises ValueError if the op or the implementation is unknown."""
        known = self.implementations(op)
        if implementation not in known:
            raise ValueError(
                f"{op}: unknown implementation {implementation!r}; known: {', '.join(known)}"
            )

    def select(self, op: str, facts: Facts, forced: str | None = None) -> Selection:
        """The first implementation that does not refuse `facts`, or the one forced, here or around.

        Raises:
            ValueError: unknown op or name, or no candidate can run; the message has the reasons.
        """
        choices = _forced.get()
        forced = choices.get(op) if forced is None else forced
        if forced is not None:
            self.check(op, forced)
        names = self.implementations(op, facts.platform) if forced is None else (forced,)
        refused = self._elsewhere(op, facts.platform) if forced is None else []
        for name in names:
            entry = self._entries[op][name]
            if entry.platform not in (None, facts.platform):
                refused.append((name, entry.elsewhere(facts.platform)))
                continue
            fn, refuses = entry.load()
            apart = [fused for fused in entry.fuses if fused in choices]
            if facts.partitioned and name != REFERENCE:
                reason = "XLA cannot cut a kernel over several devices"
            elif apart:
                reason = f"does {apart[0]} itself, which is forced to be {choices[apart[0]]}"
            else:
                reason = refuses(facts)
            if reason is None:
                selection = Selection(op, facts, name, fn, tuple(refused), forced is not None)
                self._record(selection)
                return selection
            refused.append((name, reason))
        if forced is not None:
            others = [name for name in self.implementations(op, facts.platform) if name != forced]
            raise ValueError(
                f"{op}: {forced} cannot run on {facts.device_kind}: {refused[0][1]}; force another "
                f"one of {', '.join(others)}, or none"
            )
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
        raise ValueError(f"{op}: no implementation can run on {facts.device_kind}: {reasons}")

    def _elsewhere(self, op: str, platform: str) -> list[tuple[str, str]]:
        """Why an accelerator has no kernel for an op: the kernels are for others."""
        kernels = {name: x for name, x in self._entries[op].items() if name != REFERENCE}
        if platform == "cpu" or any(x.platform in (None, platform) for x in kernels.values()):
            return []
        return [(name, x.elsewhere(platform, apart=True)) for name, x in kernels.items()]

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
        entry = self._entries[selection.op][selection.implementation]
        plain = selection.implementation == REFERENCE and not entry.composed
        fallback = plain and not selection.forced
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

    What is forced around it stays forced. A thread that is started within sees nothing of it.

    Raises:
        ValueError: an op or an implementation is unknown.
    """
    for op, implementation in choices.items():
        _registry.check(op, implementation)
    token = _forced.set({**_forced.get(), **choices})
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


def _import_ops() -> None:
    """Imports every op's package, which registers it."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.ispkg:
            importlib.import_module(f"{__package__}.{module.name}")


_registry = Registry(discover=_import_ops)
register = _registry.register
register_kernel = _registry.register_kernel
implementations = _registry.implementations
select = _registry.select
report = _registry.report


def never(facts: Facts) -> str | None:
    """The `refuses` of an implementation that runs everywhere."""
    del facts
    return None
