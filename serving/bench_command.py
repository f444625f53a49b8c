"""`hybrid-jax bench serve`: load on a server, figures on stdout as a table or JSON."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.table import Table

from serving.bench import Client, Load, Workload, WorkloadName, run, summary

bench = typer.Typer(help="Measure.", no_args_is_help=True)


@bench.callback()
def _root() -> None:
    pass  # makes `serve` a command of a group


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
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Load any server that has OpenAI's API: TTFT, TPOT, ITL, E2E, throughput and goodput."""
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
    load = Load(rate, concurrency if rate is not None else concurrency or 8)
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
    _print(report)
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


def _limits(slo: list[str]) -> dict[str, float]:
    limits: dict[str, float] = {}
    for text in slo:
        name, _, value = text.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2e"):
            raise ValueError(f"--slo must be ttft=, tpot= or e2e= with seconds, got {text!r}")
    return limits


def _print(report: dict[str, Any]) -> None:
    console = Console()
    table = Table("seconds", "p50", "p90", "p99", "mean")
    for name in ("ttft", "tpot", "itl", "e2e"):
        row = report[f"{name}_seconds"].values()
        table.add_row(name, *("-" if value is None else f"{value:.4f}" for value in row))
    console.print(table)
    for name in ("requests", "failed", "seconds", "requests_per_second", "prompt_tokens"):
        console.print(f"{name}: {report[name]:,.6g}")
    for name in ("cached_tokens", "output_tokens", "output_tokens_per_second"):
        console.print(f"{name}: {report[name]:,.6g}")
    if "goodput_requests_per_second" in report:
        console.print(f"goodput_requests_per_second: {report['goodput_requests_per_second']:,.6g}")
    for error, count in report["errors"].items():
        console.print(f"{count} x {error}")
