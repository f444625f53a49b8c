"""Block sizes that were tuned: kernels ask for them while they are traced.

`pick` answers with what is being tried, else with what was tuned for this kind of device and these
shapes, else with the kernel's own rule. What was tuned lies in JSON files, one per device kind: in
`pallas_kernels/tuned`, and in the user's cache directory, which goes first and which
`python -m pallas_kernels.bench OP --tune` writes. Of each size they say whether it was found by
time on a device or by a static profile without one.
"""

import functools
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pallas_kernels import platform

PACKAGED = Path(__file__).parent / "tuned"
# By what a size was found, an entry's "by". Without it: by time.
TIME, STATIC = "time", "static profile"

logger = logging.getLogger(__name__)

_trial: ContextVar[Mapping[str, int]] = ContextVar("trial", default=MappingProxyType({}))
_asked: ContextVar["dict[str, Question] | None"] = ContextVar("asked", default=None)


class Question(NamedTuple):
    """A block size that a kernel asked for."""

    candidates: tuple[int, ...]
    default: int


def pick(name: str, shape: Sequence[int], candidates: Sequence[int], default: int) -> int:
    """The size to use, one of `candidates`.

    Args:
        name: op and parameter, such as "gated_delta_rule.decode_heads".
        shape: everything that the best size depends on, besides the device.
        candidates: sizes that work.
        default: the kernel's own rule, one of them.
    """
    key = f"{name} {'x'.join(map(str, shape))}"
    asked = _asked.get()
    if asked is not None:
        asked[key] = Question(tuple(candidates), default)
    size = _trial.get().get(key)
    if size is None:
        size = _tuned(platform.current().kind).get(key)
    if size is None:
        return default
    if size not in candidates:
        logger.warning(
            "%s: the tuned size %s is none of %s, so %s is used; tune again", key, size, candidates,
            default,
        )  # fmt: skip
        return default
    return size


@contextmanager
def asking() -> Iterator[dict[str, Question]]:
    """Collects what kernels ask for within, by key."""
    asked: dict[str, Question] = {}
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


@contextmanager
def trying(sizes: Mapping[str, int]) -> Iterator[None]:
    """Makes `pick` answer with `sizes`, by key, besides what is tried around it.

    Trace a fresh function inside the context.
    """
    token = _trial.set({**_trial.get(), **sizes})
    try:
        yield
    finally:
        _trial.reset(token)


def user_directory() -> Path:
    """Where `write` puts what was tuned here: hybrid-jax/tuned in the user's cache directory."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hybrid-jax" / "tuned"


def file_name(device_kind: str) -> str:
    """Of the file of a device kind: "TPU v6 lite" has tpu_v6_lite.json."""
    return device_kind.lower().replace(" ", "_").replace("/", "_") + ".json"


def check_writable(device_kind: str) -> None:
    """Raises what `write` would; leaves nothing behind."""
    path = user_directory() / file_name(device_kind)
    _read(path, device_kind)
    if path.exists():
        path.open("a").close()
    else:
        directory = next(parent for parent in path.parents if parent.exists())
        tempfile.TemporaryFile(dir=directory).close()


def write(device_kind: str, added: Mapping[str, Mapping[str, Any]]) -> Path:
    """Adds entries to the user's file of a device kind and returns its path.

    Each has "size", "by" (`TIME` or `STATIC`), and whatever else says how it was found.

    Raises:
        ValueError: the file that is there already is damaged.
        OSError: it cannot be written.
    """
    path = user_directory() / file_name(device_kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = _read(path, device_kind) | dict(added)
    text = json.dumps({"device_kind": device_kind, "sizes": sizes}, indent=2, sort_keys=True)
    part = path.with_suffix(".part")  # an interrupt leaves the file as it was
    part.write_text(text + "\n")
    part.replace(path)
    _tuned.cache_clear()
    return path


def entries(device_kind: str) -> dict[str, Mapping[str, Any]]:
    """What was tuned for a device kind, by key; the user's entries go before those of the package.

    Raises:
        ValueError: a file is damaged.
    """
    directories = PACKAGED, user_directory()
    name = file_name(device_kind)
    return {k: e for d in directories for k, e in _read(d / name, device_kind).items()}


@functools.cache
def _tuned(device_kind: str) -> Mapping[str, int]:
    return {key: entry["size"] for key, entry in entries(device_kind).items()}


def _read(path: Path, device_kind: str) -> dict[str, Mapping[str, Any]]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
        sizes = dict(content["sizes"])
        if content["device_kind"] != device_kind:
            raise ValueError(f"it is for {content['device_kind']!r}")
        for key, entry in sizes.items():
            if type(entry["size"]) is not int:
                raise ValueError(f"the size of {key!r} is {entry['size']!r}")
            if entry.get("by", TIME) not in (TIME, STATIC):
                raise ValueError(f"{key!r} was found by {entry['by']!r}")
        return sizes
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no file of tuned sizes ({error!r}); remove it") from error
