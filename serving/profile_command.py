"""`hybrid-jax profile`: where the time of prefill and decode steps goes, as bars, JSON, a plot."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.bar import Bar
from rich.table import Table

from serving.kv_options import KvDtypeOption, KvRangesOption, kv_options
from serving.op_choices import parse_choices
from serving.terminal import JsonOption, console, write_json

if TYPE_CHECKING:
    from hybrid_jax.measure import PhaseProfile
    from hybrid_jax.measure.profile import Share


def profile(
    model: Annotated[
        Path | None,
        typer.Argument(help="Model directory or .gguf file. Default: the bundled model."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Sequences at once.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(help="Of each sequence.")] = 128,
    steps: Annotated[int, typer.Option(help="Decode steps that count.")] = 16,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_dtype: KvDtypeOption = None,
    kv_ranges: KvRangesOption = None,
    implementation: Annotated[
        list[str] | None, typer.Option(help="op=name: what must run an op.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help='Figure of the layers of decode steps; needs "plots".')
    ] = None,
    as_json: JsonOption = "",
) -> None:
    """Show the share of time of each kind of layer and op, beside its share of the work."""
    from hybrid_jax import measure, plots
    from hybrid_jax.bundled import bundled_model

    plots.check_path(plot)
    phases = measure.measure_profile(
        model or bundled_model(),
        rows=rows,
        prompt_tokens=prompt_tokens,
        steps=steps,
        dtype=dtype,
        implementations=parse_choices(implementation or []),
        **kv_options(kv_dtype, kv_ranges),
    )
    report: dict[str, Any] = {"phases": [phase.to_dict() for phase in phases]}
    write_json(report | measure.describe_process(), as_json)
    if plot is not None:
        plots.layer_times(phases[-1]).savefig(plot)
    if as_json == "-":
        return
    screen = console()
    for phase in phases:
        screen.print(_table(phase))
        screen.print(_steps_line(phase), soft_wrap=True)


def _table(phase: "PhaseProfile") -> Table:
    table = Table(
        title=f"{phase.phase}: {phase.tokens} tokens, {phase.rows} sequences, mean of "
        f"{phase.steps} steps",
        caption="shares of all operations' time, of operations and of bytes by formula; what is "
        "fused counts for its last part",
    )
    for name in ("kind", "op"):
        table.add_column(name, no_wrap=True)
    for name in ("ms", "time", "flops", "bytes"):
        table.add_column(name, justify="right")
    table.add_column("time", width=24)
    kinds = phase.by("kind")
    parts = phase.by("kind", "op")
    for (kind,), share in kinds.items():
        table.add_row(f"[bold]{kind}", "", *_cells(share))
        ops = {op: part for (of, op), part in parts.items() if of == kind}
        if len(ops) > 1:
            for op, part in ops.items():
                table.add_row("", op, *_cells(part))
    return table


def _cells(share: "Share") -> tuple[Any, ...]:
    numbers = (f"{share.time:.1%}", f"{share.flops:.1%}", f"{share.nbytes:.1%}")
    return f"{1e3 * share.seconds:.3f}", *numbers, Bar(1.0, 0.0, share.time, width=24)


def _steps_line(phase: "PhaseProfile") -> str:
    milliseconds = {
        "a step": phase.seconds,
        "operations running in": phase.busy_seconds,
        "gap to the next step": phase.gap_seconds,
        **{f"host, {name}": seconds for name, seconds in phase.host_seconds.items()},
    }
    return ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in milliseconds.items())
