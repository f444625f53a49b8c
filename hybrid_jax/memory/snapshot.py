"""What a running engine holds, as values that can be saved and compared with a plan."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hybrid_jax.errors import ModelError
from hybrid_jax.memory.plan import MemoryPlan

VERSION = 1


@dataclass(frozen=True)
class LiveBytes:
    """Bytes of the arrays that one device holds, padding included, and whose they are."""

    chip: str
    dtype: str
    parameters: int
    groups: tuple[int, ...]  # per cache group
    rows: int  # histories, owners and sampling parameters
    device: dict[str, int]  # bytes_in_use, peak_bytes_in_use and bytes_limit, if it says so


@dataclass(frozen=True)
class PoolMemory:
    """Use of one cache group. Units are pages or slots; the null unit is not counted."""

    name: str
    unit: str
    unit_bytes: int  # of one unit in all layers of the group
    total: int
    used: int  # by sequences
    cached: int  # kept for reuse and free to take
    peak: int  # the most that were used at once
    fragmentation: float  # share of the used bytes that holds no token a later step reads

    @property
    def free(self) -> int:
        """Units that hold nothing."""
        return self.total - self.used - self.cached

    def to_dict(self) -> dict[str, Any]:
        """Units, and the same in bytes."""
        units = ("total", "used", "cached", "free", "peak")
        numbers = {f"{name}_bytes": getattr(self, name) * self.unit_bytes for name in units}
        return asdict(self) | {"free": self.free} | numbers


@dataclass(frozen=True)
class MemorySnapshot:
    """The memory of an engine at one moment, on one of its devices."""

    model_type: str
    dtype: str
    chip: str
    config: dict[str, Any]  # of the resolved EngineConfig, num_pages filled in; no buckets
    live: dict[str, int]  # bytes by class, named as in `MemoryPlan.lines`
    pools: tuple[PoolMemory, ...]
    device: dict[str, int]  # see `LiveBytes`

    def to_json(self) -> str:
        """As text; `from_json` reads it."""
        body = asdict(self) | {"pools": [pool.to_dict() for pool in self.pools]}
        return json.dumps({"version": VERSION} | body, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "MemorySnapshot":
        """The snapshot that `to_json` wrote.

        Raises:
            ModelError: it is no snapshot, or one of another version.
        """
        try:
            body = json.loads(text)
            if body["version"] != VERSION:
                raise ModelError(
                    f"the snapshot has version {body['version']!r}, not {VERSION}; take a new one"
                )
            names = [field.name for field in fields(PoolMemory)]
            pools = tuple(PoolMemory(**{n: pool[n] for n in names}) for pool in body["pools"])
            names = [field.name for field in fields(cls) if field.name != "pools"]
            return cls(pools=pools, **{name: body[name] for name in names})
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ModelError(
                f"the file is no memory snapshot ({error}); write one with LLM.memory().to_json()"
            ) from error

    @classmethod
    def read(cls, path: str | Path) -> "MemorySnapshot":
        """The snapshot in a file."""
        return cls.from_json(Path(path).read_text())


@dataclass(frozen=True)
class Comparison:
    """Planned and live bytes of one class; None where one side has no such class."""

    name: str
    planned: int | None
    live: int | None


def compare(plan: MemoryPlan, snapshot: MemorySnapshot) -> tuple[Comparison, ...]:
    """Planned against live bytes, by class. Temporaries are planned only: they come and go."""
    planned: Mapping[str, int] = {line.name: line.nbytes for line in plan.lines()}
    names = dict.fromkeys([*planned, *snapshot.live])
    return tuple(Comparison(n, planned.get(n), snapshot.live.get(n)) for n in names)
