"""`--implementations op=name`: which implementation must run an op, on the command line."""

from collections.abc import Iterable


def parse_choices(choices: Iterable[str]) -> dict[str, str]:
    """Implementation by op, for `EngineConfig.implementations`. Raises ValueError."""
    pairs = [(choice, *choice.partition("=")) for choice in choices]
    for choice, op, _, name in pairs:
        if not op or not name:
            raise ValueError(
                f"an implementation must be op=name, got {choice!r}; use for example "
                "paged_attention=reference"
            )
    return {op: name for _, op, _, name in pairs}
