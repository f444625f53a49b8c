"""`hybrid-jax bench`: latency, throughput and kernels of the device here, load on a server."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.table import Table

from hybrid_jax.cache.chips import format_bytes
from hybrid_jax.errors import HybridJaxError
from serving.kv_options import KvDtypeOption, KvRangesOption, kv_options
from serving.op_choices import parse_choices
from serving.terminal import JsonOption, OutputOption, PlotOption, console, write_json

bench = typer.Typer(help="Measure a model, its kernels or a server.", no_args_is_help=True)

ModelArgument = Annotated[
    Path | None, typer.Argument(help="Model directory or .gguf file. Default: the bundled model.")
]
BatchOption = Annotated[
    list[int] | None, typer.Option(help="Sequences at once; give it several times. Default: 1, 4.")
]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
LengthOption = Annotated[
    int, typer.Option(help="Tokens of a sequence; 0: as many as the requests need.")
]
BudgetOption = Annotated[int, typer.Option(help="Tokens of a step.")]
GuessesOption = Annotated[int, typer.Option(help="Guesses per sequence and step; 0: none.")]
ImplementationOption = Annotated[
    list[str] | None, typer.Option(help="op=name: what must run an op.")
]
SeedOption = Annotated[int, typer.Option(help="Of prompts and lengths.")]


@bench.command()
def latency(
    model: ModelArgument = None,
    batch: BatchOption = None,
    prompt_tokens: Annotated[int, typer.Option(help="Of each request.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Of each request.")] = 64,
    rounds: Annotated[int, typer.Option(help="That count; one more warms up.")] = 5,
    dtype: DtypeOption = "auto",
    kv_dtype: KvDtypeOption = None,
    kv_ranges: KvRangesOption = None,
    max_model_len: LengthOption = 0,
    max_num_batched_tokens: BudgetOption = 1024,
    num_speculative_tokens: GuessesOption = 0,
    implementation: ImplementationOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = "",
) -> None:
    """Time requests that start together: to the first token, per token, between tokens."""
    from hybrid_jax import measure

    batches = batch or [1, 4]
    runner = _open(
        model,
        dtype,
        implementation,
        max_num_seqs=max(batches),
        max_model_len=max_model_len or prompt_tokens + output_tokens,
        max_num_batched_tokens=max_num_batched_tokens,
        num_speculative_tokens=num_speculative_tokens,
        **kv_options(kv_dtype, kv_ranges),
    )
    results = measure.measure_latency(
        runner,
        batches,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        rounds=rounds,
        seed=seed,
        progress=_say,
    )
    report = {"latency": [result.to_dict() for result in results]} | measure.describe(runner)
    write_json(report, as_json)
    if as_json != "-":
        _print_latency(report)


@bench.command()
def throughput(
    model: ModelArgument = None,
    batch: BatchOption = None,
    requests: Annotated[int, typer.Option(help="In the queue from the start.")] = 32,
    prompt_tokens: Annotated[str, typer.Option(help="Random length, lowest-highest.")] = "32-128",
    output_tokens: Annotated[str, typer.Option(help="Random length, lowest-highest.")] = "16-64",
    dtype: DtypeOption = "auto",
    kv_dtype: KvDtypeOption = None,
    kv_ranges: KvRangesOption = None,
    max_model_len: LengthOption = 0,
    max_num_batched_tokens: BudgetOption = 1024,
    num_speculative_tokens: GuessesOption = 0,
    implementation: ImplementationOption = None,
    seed: SeedOption = 0,
    plot: PlotOption = None,
    as_json: JsonOption = "",
) -> None:
    """Run a queue of requests of random lengths: tokens per second, host time, peak memory."""
    from hybrid_jax import measure, plots

    plots.check_path(plot)
    prompts = _range("--prompt-tokens", prompt_tokens)
    outputs = _range("--output-tokens", output_tokens)
    batches = batch or [1, 4]
    runner = _open(
        model,
        dtype,
        implementation,
        max_num_seqs=max(batches),
        max_model_len=max_model_len or prompts[1] + outputs[1],
        max_num_batched_tokens=max_num_batched_tokens,
        num_speculative_tokens=num_speculative_tokens,
        **kv_options(kv_dtype, kv_ranges),
    )
    results = measure.measure_throughput(
        runner,
        batches,
        requests=requests,
        prompt_tokens=prompts,
        output_tokens=outputs,
        seed=seed,
        progress=_say,
    )
    report = {"throughput": [result.to_dict() for result in results]} | measure.describe(runner)
    write_json(report, as_json)
    if plot is not None:
        plots.throughput(results).savefig(plot)
    if as_json != "-":
        _print_throughput(report)


@bench.command()
def kernels(
    op: Annotated[
        list[str] | None, typer.Argument(help="Ops; default: all. They are pallas_kernels/<op>.")
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Cases of the op's cases.py; default: all.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Of the decode batch.")] = 16,
    context: Annotated[int, typer.Option(help="Tokens of its rows before it.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Of the prefill batch.")] = 512,
    rounds: Annotated[int, typer.Option(help="Samples of each implementation, in turn.")] = 7,
    as_json: JsonOption = "",
) -> None:
    """Time the implementations of ops on shapes of real models, as pallas_kernels.bench does."""
    from hybrid_jax import measure

    timings = measure.time_op(
        *(op or measure.OPS),
        cases=case or (),
        rows=rows,
        context=context,
        tokens=tokens,
        rounds=rounds,
    )
    write_json(measure.describe_process() | measure.timing_report(timings), as_json)
    if as_json == "-":
        return
    table = Table("op", *measure.TIMING_HEADER, caption="medians; every one ran before, uncounted")
    for timing, cells in zip(timings, measure.timing_lines(timings), strict=True):
        table.add_row(timing.op, *cells)
    console().print(table)


@bench.command()
def serve(
    url: Annotated[str, typer.Option(help="Without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Empty: the first that the server lists.")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY")] = "none",
    workload: Annotated[str, typer.Option(help="random, shared-prefix or multi-turn.")] = "random",
    sessions: Annotated[int, typer.Option(help="Prompts, or conversations.")] = 100,
    prompt_words: Annotated[int, typer.Option(help="Random words per turn.")] = 100,
    prefix_words: Annotated[int, typer.Option(help="That all prompts share.")] = 500,
    turns: Annotated[int, typer.Option(help="Of a conversation.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens per turn.")] = 64,
    rate: Annotated[float | None, typer.Option(help="Sessions per second, open loop.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Sessions at once, closed loop.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Always max_tokens; vLLM's extension.")] = False,
    slo: Annotated[
        list[str] | None, typer.Option(help="ttft=0.5, tpot=0.05 or e2e=10, in seconds.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of texts and arrivals.")] = 0,
    output: OutputOption = None,
) -> None:
    """Load any server that has OpenAI's API: TTFT, TPOT, ITL, E2E, throughput and goodput."""
    try:
        from serving.bench import Client, Load, Workload, WorkloadName, run, summary
    except ModuleNotFoundError as error:
        raise HybridJaxError(
            f'{error.name} is not installed; pip install "hybrid-jax[serve]"'
        ) from None
    names = get_args(WorkloadName)
    if workload not in names:
        raise ValueError(f"--workload must be {', '.join(names)}, got {workload!r}; choose one")
    work = Workload(
        cast(WorkloadName, workload),
        sessions,
        prompt_words,
        prefix_words,
        turns,
        max_tokens,
        seed,
    )
    load = Load(rate, 8 if rate is None and concurrency is None else concurrency)
    limits = _limits(slo or [])

    async def measure() -> dict[str, Any]:
        extra = {"ignore_eos": True} if ignore_eos else {}
        client = Client(url, model or await first_model(url, api_key), api_key=api_key, extra=extra)
        try:
            return summary(*await run(client, work, load), limits)
        finally:
            await client.close()

    report = {"workload": vars(work), "load": vars(load)} | asyncio.run(measure())
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n")
    _print_load(report)
    if report["failed"]:
        raise typer.Exit(1)


async def first_model(url: str, api_key: str) -> str:
    """The name of the first model that a server lists. Raises ValueError when there is none."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"}
    try:
        async with httpx.AsyncClient(headers=headers) as http:
            response = (await http.get(f"{url.rstrip('/')}/v1/models")).raise_for_status()
            return response.json()["data"][0]["id"]
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise ValueError(f"{url} lists no models ({error}); start it or give --model") from None


def _open(model: Path | None, dtype: str, implementation: list[str] | None, **options: Any) -> Any:
    """A runner on the device here."""
    from hybrid_jax.bundled import bundled_model
    from hybrid_jax.measure import open_runner

    options["implementations"] = parse_choices(implementation or [])
    return open_runner(model or bundled_model(), dtype=dtype, **options)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _range(name: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise ValueError(f"{name} must be lowest-highest, got {text!r}; use 32-128") from None


def _limits(slo: list[str]) -> dict[str, float]:
    limits: dict[str, float] = {}
    for text in slo:
        name, _, value = text.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2e") or not limits[name] > 0:  # nor NaN
            raise ValueError(f"--slo must be ttft=, tpot= or e2e= with seconds, got {text!r}")
    return limits


def _print_latency(report: dict[str, Any]) -> None:
    table = Table(
        "sequences", "ms", "p50", "p90", "p99", "mean", title=_title(report), caption=_WARM
    )
    for result in report["latency"]:
        for name in ("ttft", "tpot", "itl", "e2e"):
            values = result[f"{name}_seconds"].values()
            cells = ("-" if value is None else f"{1e3 * value:.2f}" for value in values)
            table.add_row(str(result["batch"]) if name == "ttft" else "", name, *cells)
        table.add_section()
    screen = console()
    screen.print(table)
    screen.print(_kernels_line(report))


def _print_throughput(report: dict[str, Any]) -> None:
    columns = ("sequences", "output tokens/s", "prompt tokens/s", "steps", "host ms/step")
    table = Table(*columns, "peak bytes in use", title=_title(report), caption=_WARM)
    for result in report["throughput"]:
        peaks = (f"{name}: {format_bytes(n)}" for name, n in result["peak_bytes"].items())
        table.add_row(
            str(result["batch"]),
            f"{result['output_tokens_per_second']:,.1f}",
            f"{result['prompt_tokens_per_second']:,.1f}",
            f"{result['steps']:,}",
            f"{1e3 * result['host_seconds_per_step']:.2f}",
            "\n".join(peaks),
        )
        table.add_section()
    screen = console()
    screen.print(table)
    screen.print(_kernels_line(report))


_WARM = "a run that is not counted came first, and compiled"


def _title(report: dict[str, Any]) -> str:
    model, machine = report["model"], report["machine"]
    devices = ", ".join(dict.fromkeys(machine["devices"]))
    where = machine["processor"] if machine["platform"] == "cpu" else devices
    return f"{model['type']} in {model['dtype']} on {where}, load {machine['load_average']:.1f}"


def _kernels_line(report: dict[str, Any]) -> str:
    chosen = dict.fromkeys(f"{c['op']}: {c['implementation']}" for c in report["kernels"])
    return f"kernels: {', '.join(chosen)}"


def _print_load(report: dict[str, Any]) -> None:
    screen = console()
    table = Table("seconds", "p50", "p90", "p99", "mean")
    for name in ("ttft", "tpot", "itl", "e2e"):
        row = report[f"{name}_seconds"].values()
        table.add_row(name, *("-" if value is None else f"{value:.4f}" for value in row))
    screen.print(table)
    for name in ("requests", "failed", "seconds", "requests_per_second", "prompt_tokens"):
        screen.print(f"{name}: {report[name]:,.6g}")
    for name in ("cached_tokens", "output_tokens", "output_tokens_per_second"):
        screen.print(f"{name}: {report[name]:,.6g}")
    if "goodput_requests_per_second" in report:
        screen.print(f"goodput_requests_per_second: {report['goodput_requests_per_second']:,.6g}")
    for error, count in report["errors"].items():
        screen.print(f"{count} x {error}")
