"""`hybrid-jax check`: can a model's numbers be trusted?"""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from serving.op_choices import parse_choices
from serving.terminal import console

if TYPE_CHECKING:
    from hybrid_jax.checking import CheckReport, LayerError

DEFAULT = "run"


class _RunsByDefault(TyperGroup):
    """`check PATH` is `check run PATH`; a model in a folder named like a command is ./drift."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else [DEFAULT, *args])


check = typer.Typer(
    cls=_RunsByDefault,
    no_args_is_help=True,
    help="Check a model's numbers. `check PATH` is short for `check run PATH`.",
    context_settings={"ignore_unknown_options": True},  # they are those of `run`
)

ModelArgument = Annotated[Path, typer.Argument(help="Model directory or .gguf file.")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]


@check.command(DEFAULT)
def run(
    path: ModelArgument,
    reference: Annotated[
        Path | None, typer.Option(help="File of record-reference; default: against itself only.")
    ] = None,
    dtype: DtypeOption = "auto",
    tokens: Annotated[
        int, typer.Option(help="Of each text. 0: as many as the reference has, or 32.")
    ] = 0,
    long: Annotated[
        int, typer.Option(help="Tokens of the long prompt. 0: more than two windows.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the sampled texts.")] = 0,
    implementation: Annotated[
        list[str] | None,
        typer.Option(help="op=name: what must run an op, such as paged_attention=reference."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Check a model against a reference and against itself; exit code 1 if a check fails.

    Against the reference: hidden states (names the first layer that diverges), prefill logits,
    greedy tokens. Against itself: alone and batched, decode and prefill, repetition, a long prompt,
    turns, seeds.
    """
    from hybrid_jax.checking import Reference, check_model

    recorded = None if reference is None else Reference.load(reference)
    with Console(stderr=True).status("checking"):
        report = check_model(
            path,
            recorded,
            dtype=dtype,
            num_tokens=tokens,
            long_tokens=long,
            seed=seed,
            implementations=parse_choices(implementation or []),
        )
    if as_json:
        typer.echo(json.dumps(_as_json(report), indent=2))
    else:
        title = f"{path} in {report.dtype}"
        if recorded is not None:
            title += f" against {recorded.made_by} in {recorded.dtype}"
        _print_report(report, title)
    if report.failed:
        raise typer.Exit(1)


def _print_report(report: "CheckReport", title: str) -> None:
    table = Table("check", "result", title=title)
    for name in ("figure", "bound"):
        table.add_column(name, justify="right")
    table.add_column("")
    for finding in report.findings:
        row = (finding.check, finding.verdict, f"{finding.figure:.2g}", f"{finding.bound:.2g}")
        table.add_row(*row, finding.detail, style=_STYLES[finding.verdict])
    out = console()
    out.print(table)
    if any(layer.position is not None for layer in report.layers):
        out.print(_layer_table(report.layers))


_STYLES = {"pass": "", "warn": "yellow", "fail": "red"}


def _layer_table(layers: "tuple[LayerError, ...]") -> Table:
    table = Table(title="hidden states against the reference")
    for name in ("after layer", "difference", "bound", "first wrong position"):
        table.add_column(name, justify="right")
    for layer in layers:
        name = str(layer.layer - 1) if layer.layer else "embedding"
        wrong = "" if layer.position is None else str(layer.position)
        table.add_row(name, f"{layer.error:.2g}", f"{layer.bound:.2g}", wrong)
    return table


def _as_json(report: "CheckReport") -> dict[str, Any]:
    """NaN, which JSON does not have, becomes null."""
    found = {"failed": report.failed, **asdict(report)}
    for line in (*found["findings"], *found["layers"]):
        for name, value in line.items():
            if isinstance(value, float) and not math.isfinite(value):
                line[name] = None
    return found


@check.command()
def record_reference(
    path: Annotated[Path, typer.Argument(help="Hugging Face directory.")],
    target: Annotated[Path, typer.Argument(help="File to write (safetensors).")],
    prompts: Annotated[
        Path | None, typer.Option(help="Text file, a prompt per line. Default: some of our own.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Greedy tokens per prompt.")] = 32,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Save what transformers makes of some prompts, for `check PATH --reference`. Needs torch."""
    from hybrid_jax.checking import record_reference as record

    texts = [] if prompts is None else [t for t in prompts.read_text().splitlines() if t.strip()]
    if prompts is not None and not texts:
        raise ValueError(f"--prompts {str(prompts)!r} holds no text; write a prompt per line")
    with Console(stderr=True).status("recording"):
        reference = record(path, prompts=texts, num_tokens=tokens, dtype=dtype)
    reference.save(target)
    typer.echo(f"wrote {target}: {len(reference.prompts)} prompts, {reference.made_by}")


@check.command()
def drift(
    path: ModelArgument,
    tokens: Annotated[int, typer.Option(help="0: the model's longest, at most 8,192.")] = 0,
    threshold: Annotated[
        float, typer.Option(help="Largest mean difference, in deviations of the logits.")
    ] = 0.05,
    dtype: DtypeOption = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the text.")] = 0,
) -> None:
    """Decode with states in bfloat16 against float32; exit code 1 if they drift apart."""
    from hybrid_jax.checking.drift import measure_drift
    from hybrid_jax.loading import load_model

    report = measure_drift(load_model(path, dtype=dtype), tokens, seed=seed)
    table = Table(title="state_dtype bfloat16 against float32")
    for name in ("tokens", "max logit", "mean logit", "in deviations", "KL, nats", "same argmax"):
        table.add_column(name, justify="right")
    for row in report.rows:
        table.add_row(
            f"{row.start:,} - {row.end:,}",
            f"{row.max_difference:.3g}",
            f"{row.mean_difference:.3g}",
            f"{row.relative:.3g}",
            f"{row.kl_divergence:.2g}",
            f"{row.agreement:.1%}",
        )
    out = console()
    out.print(table)
    first = report.first_difference
    where = f"first differs at token {first:,}" if first else "never differs"
    out.print(f"the most likely token {where}")
    if report.worst > threshold:
        out.print(f"drifts: {report.worst:.3g} deviations, more than {threshold:g}")
        raise typer.Exit(1)
    out.print(f"passes: {report.worst:.3g} deviations, at most {threshold:g}")
