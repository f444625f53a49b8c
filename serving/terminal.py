"""Where the commands' figures go: tables in the terminal, JSON in a file or on stdout."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

NO_LIMIT = 10_000  # columns, where the output is no terminal: tables are as wide as their cells


def _check_target(option: typer.CallbackParam, target: Any) -> Any:
    """Raises ValueError if there cannot be such a file, before anything is measured for it."""
    if target not in (None, "", "-"):
        path = Path(target)
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(
                f"{option.opts[0]} {str(target)!r} is no file in an existing directory; name one"
            )
    return target


JsonOption = Annotated[
    str,
    typer.Option(
        "--json",
        help="JSON file for the figures; -: stdout, without tables.",
        callback=_check_target,
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option(help="JSON file for the figures.", callback=_check_target)
]
PlotOption = Annotated[
    Path | None, typer.Option(help='Figure to write, as .png, .pdf or .svg; needs "plots".')
]


def console() -> Console:
    """For tables; not wider than the terminal, if it is one."""
    made = Console()
    return made if made.is_terminal else Console(width=NO_LIMIT)


def write_json(report: dict[str, Any], target: str) -> None:
    """Writes to the file, to stdout for "-", or not at all for ""."""
    text = json.dumps(report, indent=2)
    if target == "-":
        typer.echo(text)
    elif target:
        Path(target).write_text(text + "\n")
