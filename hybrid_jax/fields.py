"""Checks of values that users give: one sentence with the name, the value and the remedy."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

Check = Callable[[str, Any], Any]  # (name, value) -> the value as it is kept; or ValueError
INT32_MAX = 2**31 - 1


def normalise(target: object, checks: Mapping[str, Check]) -> None:
    """Replaces the fields of a frozen dataclass by what their checks return."""
    for name, check in checks.items():
        object.__setattr__(target, name, check(name, getattr(target, name)))


def shown(value: object) -> str:
    """The value on one line of at most 60 characters, for a message."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a foreign __repr__, or an integer of thousands of digits
        text = f"one {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def reason(error: BaseException) -> str:
    """An error's message on one line of at most 300 characters; its type if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def plain(value: Any) -> Any:
    """Scalars of numpy, JAX and PyTorch as Python's, anything else as it is."""
    scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    return value.item() if scalar else value


def integer(least: int, most: int, remedy: str, *, or_zero: bool = False) -> Check:
    """An int in [least, most], or 0 with `or_zero`; bools and floats are none.

    `remedy` says what to do about a value that is too small or no integer.
    """

    def check(name: str, value: Any) -> int:
        value = plain(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} must be an integer, got {shown(value)}; {remedy}")
        if value < least and not (or_zero and value == 0):
            raise ValueError(f"{name} must be at least {least}, got {shown(value)}; {remedy}")
        if value > most:
            raise ValueError(f"{name} must be at most {most}, got {shown(value)}; lower it")
        return value

    return check


def number(least: float, most: float, remedy: str, *, above: bool = False) -> Check:
    """A float in [least, most], with `above` greater than `least`; NaN and bools are none."""

    def check(name: str, value: Any) -> float:
        value = plain(value)
        try:
            numeric = math.nan if isinstance(value, str | bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            numeric = math.nan
        if not least <= numeric <= most or (above and numeric == least):  # NaN fails, too
            left = "(" if above else "["
            raise ValueError(
                f"{name} must be in {left}{least:g}, {most:g}], got {shown(value)}; {remedy}"
            )
        return numeric

    return check


def boolean(name: str, value: Any) -> bool:
    """A bool and nothing else: a word such as "no" would count as true."""
    value = plain(value)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be a bool, got {shown(value)}; use True or False")
    return value


def choice(choices: Collection[str]) -> Check:
    """One of `choices`."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{name} {shown(value)} is not supported; choose {', '.join(choices)}")
        return value

    return check


def tuple_of(check: Check, *, most: int) -> Check:
    """A tuple of at most `most` items that pass `check`, from any list, tuple, set or vector."""

    def check_all(name: str, value: Any) -> tuple[Any, ...]:
        vector = getattr(value, "ndim", None) == 1
        if isinstance(value, str | bytes) or not (isinstance(value, Sequence | Set) or vector):
            raise ValueError(f"{name} must be a list, got {shown(value)}; put it into [ ]")
        if len(value) > most:
            raise ValueError(f"{name} must have at most {most} items, got {len(value)}; send fewer")
        return tuple(check(name, item) for item in value)

    return check_all


def or_none(check: Check) -> Check:
    """None, or what passes `check`."""
    return lambda name, value: None if value is None else check(name, value)
