"""The `hybrid-jax` command line. A user's mistake is one sentence on stderr and exit code 2."""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.table import Table

from hybrid_jax.cache.chips import format_bytes
from hybrid_jax.errors import HybridJaxError
from serving import commands_plan
from serving.bench_command import bench
from serving.check_command import check
from serving.commands_plan import PathArgument
from serving.kv_options import KvDtypeOption, KvRangesOption, kv_options
from serving.op_choices import parse_choices
from serving.profile_command import profile
from serving.terminal import console

if TYPE_CHECKING:
    from hybrid_jax import LLM, SamplingParams

# Typer has a copy of click, or in older versions click itself: this is the class in either.
_UsageError: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Inference for hybrid-attention language models in JAX.",
)

ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model", "-m", help="Model directory or .gguf file. Default: the bundled model."
    ),
]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option(help="Log what the library does.")] = False,
) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        context.exit(2)


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts, run as one batch.")],
    model: ModelOption = None,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Most likely tokens kept; 0 is off.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_dtype: KvDtypeOption = None,
    kv_ranges: KvRangesOption = None,
    max_model_len: Annotated[int, typer.Option(help="0: the model's, at most 8,192.")] = 0,
    tensor_parallel_size: Annotated[int, typer.Option(help="Devices to cut the model over.")] = 1,
    num_speculative_tokens: Annotated[int, typer.Option(help="Guesses per step; 0: none.")] = 0,
    chat: Annotated[bool, typer.Option(help="Wrap each prompt in the chat template.")] = False,
    enforce_eager: Annotated[bool, typer.Option(help="Run the step unjitted, to debug.")] = False,
    implementation: Annotated[
        list[str] | None,
        typer.Option(help="op=name: what must run an op, such as paged_attention=reference."),
    ] = None,
) -> None:
    """Continue text. One prompt streams; several print in order when all are done."""
    from hybrid_jax import LLM, SamplingParams
    from hybrid_jax.bundled import bundled_model

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens
    )
    options = {
        "max_model_len": max_model_len,
        "tensor_parallel_size": tensor_parallel_size,
        "num_speculative_tokens": num_speculative_tokens,
        "enforce_eager": enforce_eager,
        "implementations": parse_choices(implementation or []),
        "max_num_seqs": min(len(prompts), 16),
        **kv_options(kv_dtype, kv_ranges),
    }
    with LLM(model or bundled_model(), dtype=dtype, **options) as llm:
        if chat:
            messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(messages, params, use_tqdm=False)
        elif len(prompts) == 1:
            _stream(llm, prompts[0], params)
            return
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            if output.outputs[0].error is not None:
                raise output.outputs[0].error
            prefix = "" if chat else output.prompt or ""
            typer.echo(prefix + output.outputs[0].text)


def _stream(llm: "LLM", prompt: str, params: "SamplingParams") -> None:
    events = llm.stream(prompt, params)  # refuses a bad prompt before anything is printed
    typer.echo(prompt, nl=False)
    for event in events:
        typer.echo(event.text, nl=False)
        sys.stdout.flush()
        if event.error is not None:
            typer.echo()
            raise event.error
    typer.echo()


@app.command()
def inspect(
    path: PathArgument,
    dtype: Annotated[str, typer.Option(help="Of weights and K/V.")] = "bfloat16",
    max_model_len: Annotated[int, typer.Option(help="0: the model's, at most 8,192.")] = 0,
) -> None:
    """Print the layer list, parameters, and the cache bytes of each kind of layer."""
    from hybrid_jax.inspection import describe_layer, inspect_model

    report = inspect_model(path, dtype=dtype, max_model_len=max_model_len)
    screen = console()
    layers = Table("layer", "kind", "mixer", "feed-forward", title=report.config.model_type)
    for i, layer in enumerate(report.config.layers):
        layers.add_row(str(i), *describe_layer(layer))
    screen.print(layers)
    counts = ", ".join(f"{count} {kind}" for kind, count in report.config.layer_counts.items())
    screen.print(f"layers: {counts}")
    screen.print(
        f"parameters: {report.num_parameters:,} ({format_bytes(report.parameter_bytes)} in {dtype})"
    )
    caches = Table(
        "cache class",
        "layers",
        "per token",
        f"per sequence of {report.max_model_len:,} tokens",
        title=f"cache, {dtype}; recurrent states float32",
    )
    for line in report.caches:
        caches.add_row(
            line.kind,
            str(len(line.layers)),
            format_bytes(line.bytes_per_token),
            format_bytes(line.bytes_per_sequence),
        )
    total = sum(line.bytes_per_sequence for line in report.caches)
    caches.add_row("total", str(len(report.config.layers)), "", format_bytes(total))
    screen.print(caches)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Model directory or .gguf file.")],
    target: Annotated[Path, typer.Argument(help="New directory for the Orbax checkpoint.")],
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Write an Orbax checkpoint that loads without conversion and restores sharded."""
    from hybrid_jax.loading import orbax

    orbax.convert(source, target, dtype=dtype)
    typer.echo(f"wrote {target}")


app.command()(commands_plan.plan)
app.command()(commands_plan.kernels)
app.add_typer(check, name="check")
app.add_typer(bench, name="bench")
app.command()(profile)


def _add_serve() -> None:
    try:
        from serving.serve_command import serve
    except ModuleNotFoundError as error:
        missing = error.name

        def unavailable() -> None:
            raise HybridJaxError(f'{missing} is not installed; pip install "hybrid-jax[serve]"')

        anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        needs = r'Needs pip install "hybrid-jax\[serve]".'  # not markup
        app.command("serve", context_settings=anything, help=needs)(unavailable)
        return
    app.command()(serve)


_add_serve()


def main() -> None:
    """Entry point of the console script."""
    try:
        raise SystemExit(app(standalone_mode=False))
    except _UsageError as error:  # an option or command that does not exist, and the like
        message = error.format_message().rstrip(".")
        if not message:  # a group of commands alone, which has shown its help
            raise SystemExit(2) from None
        _fail(f"{message}; see hybrid-jax --help")
    except typer.Abort:
        raise SystemExit(130) from None
    except (HybridJaxError, ValueError, OSError) as error:
        # What the library raises on purpose; anything else is our bug and keeps its traceback.
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    typer.echo(f"hybrid-jax: {' '.join(message.split())}", err=True)
    raise SystemExit(2) from None
