"""`hybrid-jax plan` and `kernels`: what a model takes, and what runs it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from hybrid_jax.cache.chips import CHIPS
from serving.kv_options import KvDtypeOption, kv_options
from serving.op_choices import parse_choices
from serving.terminal import PlotOption, console

if TYPE_CHECKING:
    from hybrid_jax.inspection import PlannedKernel
    from hybrid_jax.memory.plan import MemoryPlan
    from hybrid_jax.memory.snapshot import MemorySnapshot

PathArgument = Annotated[
    Path, typer.Argument(help="Model directory, .gguf file or config.json; no weights are read.")
]
ChipOption = Annotated[
    str, typer.Option(help=f"cpu, {', '.join(CHIPS)}. Default: the device here.")
]


def plan(
    path: PathArgument,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences that run at once.")] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens of a page.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens of a step.")] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "auto",
    kv_dtype: KvDtypeOption = None,
    state_dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    checkpoints: Annotated[int | None, typer.Option(help="State rows kept for reuse.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Guesses per step.")] = None,
    chip: ChipOption = "",
    tp: Annotated[int | None, typer.Option(help="Devices to cut the model over.")] = None,
    memory_utilization: Annotated[float | None, typer.Option(help="Share to fill.")] = None,
    estimate: Annotated[
        bool, typer.Option(help="Guess the step's temporaries instead of compiling it.")
    ] = False,
    compare: Annotated[
        Path | None,
        typer.Option(help="Snapshot (LLM.memory().to_json()) to hold against; its flags apply."),
    ] = None,
    plot: PlotOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Add up what a model takes on a chip, and how many sequences that leaves room for."""
    from hybrid_jax import plots
    from hybrid_jax.cache.chips import find_chip
    from hybrid_jax.config import EngineConfig
    from hybrid_jax.loading import config_dtype, load_config
    from hybrid_jax.memory.plan import plan_memory
    from hybrid_jax.memory.snapshot import MemorySnapshot

    plots.check_path(plot)
    given = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "page_size": page_size,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_dtype": kv_dtype,
        "state_dtype": state_dtype,
        "num_checkpoints": checkpoints,
        "num_speculative_tokens": num_speculative_tokens,
        "tensor_parallel_size": tp,
        "memory_utilization": memory_utilization,
    }
    options = {name: value for name, value in given.items() if value is not None}
    snapshot = None if compare is None else MemorySnapshot.read(compare)
    if snapshot is not None:
        options = snapshot.config | options
        dtype = snapshot.dtype if dtype == "auto" else dtype
    model, raw = load_config(path)
    planned = plan_memory(
        model,
        EngineConfig(**options),
        config_dtype(dtype, raw),
        chip=find_chip(chip),
        temporaries_from="estimate" if estimate else "compiler",
    )
    _show_plan(planned, snapshot, plot, as_json)


def _show_plan(
    plan: "MemoryPlan", snapshot: "MemorySnapshot | None", plot: Path | None, as_json: bool
) -> None:
    from hybrid_jax import plots
    from hybrid_jax.memory import tables
    from hybrid_jax.memory.snapshot import compare

    if plot is not None:
        plots.memory_plan(plan).savefig(plot)
    if as_json:
        report = plan.to_dict()
        if snapshot is not None:
            report["comparison"] = [vars(line) for line in compare(plan, snapshot)]
        typer.echo(json.dumps(report, indent=2))
        return
    screen = console()
    screen.print(tables.plan_table(plan))
    if snapshot is None:
        screen.print(tables.concurrency_table(plan))
    else:
        screen.print(tables.comparison_table(plan, snapshot))
        screen.print(tables.pools_table(snapshot))


def kernels(
    path: Annotated[
        Path | None,
        typer.Argument(help="Model directory, .gguf file or config.json; default: bundled."),
    ] = None,
    chip: ChipOption = "",
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences that run at once.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens of a page.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens of a step.")] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "auto",
    kv_dtype: KvDtypeOption = None,
    tp: Annotated[int | None, typer.Option(help="Devices to cut the model over.")] = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(help="op=name: what must run an op, such as paged_attention=reference."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Show which implementation runs each op of a model on a chip, and why no better one does."""
    from hybrid_jax import EngineConfig, plan_kernels
    from hybrid_jax.bundled import bundled_model
    from hybrid_jax.cache.chips import find_chip

    given = {
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "page_size": page_size,
        "max_num_batched_tokens": max_num_batched_tokens,
        "tensor_parallel_size": tp,
        "implementations": parse_choices(implementation or []),
        **kv_options(kv_dtype),
    }
    config = EngineConfig(**{name: value for name, value in given.items() if value is not None})
    target = find_chip(chip)
    planned = plan_kernels(
        path or bundled_model(), config, chip=target if chip else None, dtype=dtype
    )
    if as_json:
        typer.echo(json.dumps([asdict(kernel) for kernel in planned], indent=2))
        return
    console().print(_kernel_table(planned, target.name))


def _kernel_table(planned: "tuple[PlannedKernel, ...]", chip: str) -> Table:
    table = Table("phase", "op", "layers", "operands", "implementation", "refused", title=chip)
    for kernel in planned:
        choice = kernel.choice
        table.add_row(
            kernel.phase,
            choice.op,
            str(kernel.layers),
            "\n".join(
                f"{name} {value}"
                for name, value in choice.operands.items()
                if value not in ("False", "None")  # options that are off
            ),
            f"{choice.implementation}{' (forced)' if choice.forced else ''}",
            "\n".join(f"{name}: {reason}" for name, reason in choice.refused.items()),
        )
        table.add_section()
    return table
