"""`hybrid-jax serve`: every setting of `ServerConfig` as a flag, in the groups that it names."""

import inspect
import logging
import os
import signal
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from serving.config import ServerConfig, load_config
from serving.op_choices import parse_choices

logger = logging.getLogger(__name__)

_GROUPS = ("Model", "Network", "Limits", "Operations", "Replicas", "Engine")


def serve(config: Path | None, **flags: Any) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    Every flag is also a variable HYBRID_JAX_<FLAG> and a key of the YAML file that --config names;
    a flag goes before the variable, the variable before the file. SIGTERM ends it in order.
    """
    from serving.logs import configure_logging

    signal.signal(signal.SIGTERM, _leave)  # until `serve` has something to drain

    given = {name: value for name, value in flags.items() if value is not None and value != []}
    if "implementations" in given:
        given["implementations"] = parse_choices(given["implementations"])
    if "replica_resources" in given:
        given["replica_resources"] = _amounts(given["replica_resources"])
    settings = load_config(given, config)
    configure_logging(settings.log_level)

    from serving.server import run_server

    raise typer.Exit(run_server(settings))


def _leave(number: int, frame: types.FrameType | None) -> None:
    """Ends a process that does not serve yet, at once: there is nothing to put in order.

    Not by an exception: one that is raised below a callback of C code gets lost, or crashes it.
    """
    del frame
    logger.info("stopped before it served", extra={"signal": signal.Signals(number).name})
    os._exit(0)


def _amounts(pairs: list[str]) -> dict[str, str]:
    """Amount by resource; pydantic makes numbers of them."""
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"replica_resources must be name=amount, got {pair!r}; such as GPU=1")
    return dict(pair.split("=", 1) for pair in pairs)


def _parameters() -> Iterator[inspect.Parameter]:
    fields = ServerConfig.model_fields
    about = fields["model"].description
    yield _parameter("model", Path | None, typer.Argument(help=about, show_default=False))
    file = typer.Option(help="YAML file with settings.", rich_help_panel="Model")
    yield _parameter("config", Path | None, file)
    for name, field in sorted(fields.items(), key=lambda item: _GROUPS.index(_group(item[1]))):
        if name != "model":
            yield _parameter(name, _flag_type(field.annotation), _option(name, field))


def _parameter(name: str, annotation: Any, info: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=Annotated[annotation, info])


def _option(name: str, field: FieldInfo) -> Any:
    default = "" if field.default in (None, "", (), {}) else f" Default: {field.default}."
    choices = typing.get_args(field.annotation) if _is_choice(field.annotation) else ()
    text = f"{field.description} {'One of ' + ', '.join(choices) + '.' if choices else ''}{default}"
    return typer.Option(
        help=" ".join(text.split()), rich_help_panel=_group(field), show_default=False
    )


def _group(field: FieldInfo) -> str:
    return typing.cast(dict[str, str], field.json_schema_extra)["group"]


def _flag_type(annotation: Any) -> Any:
    """What typer reads from the command line; pydantic checks the value afterwards."""
    if _is_choice(annotation):
        return str | None
    if typing.get_origin(annotation) is Mapping:
        return list[str] | None
    if typing.get_origin(annotation) is tuple:
        return list[typing.get_args(annotation)[0]] | None
    if isinstance(annotation, types.UnionType):
        return annotation
    return annotation | None


def _is_choice(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.Literal


serve.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
