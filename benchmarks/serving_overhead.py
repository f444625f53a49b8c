"""What the servers cost: tokens a second against `LLM.generate` in process, and added TTFT.

    python -m benchmarks.serving_overhead --model path/to/model

For each concurrency every way (in process, HTTP, gRPC) runs the same prompts, greedy, one after the
other, in rounds; the first round is a warm-up. Figures are medians over rounds of a way's figure
against that of the same round in process, so that what else runs there hits both alike; the range
says how far to trust them. The server has a process of its own; `LLM.generate` and then the clients
run in this one, and the clients take their part of the cores. Processor seconds per token, of the
process with the model only, hardly depend on what else runs there.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.bundled import bundled_model
from serving.bench import Client, Load, Workload, run, summary
from serving.client import AsyncClient

# Of an uncounted request before every round: a process that has waited while the others ran finds
# its weights gone from the caches, and on some machines from memory.
WAKE_TOKENS = 2


class Figures(NamedTuple):
    """Of one round of one way."""

    tokens_per_second: float
    ttft_seconds: float  # of a prompt alone
    processor_seconds_per_token: float


class Server(NamedTuple):
    """A server process and where it listens."""

    process: subprocess.Popen[bytes]
    http: str
    grpc: str


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The same for all ways. Without the prefix cache, or later rounds would be cheaper."""
    return {
        "max_num_seqs": max(args.concurrency),
        "max_model_len": args.max_model_len,
        "row_buckets": tuple(args.concurrency),
        "max_num_batched_tokens": 512,
        "token_buckets": (512,),
        "prefix_cache": False,
        "warmup": True,
    }


def in_process(llm: LLM, workload: Workload) -> Figures:
    """A round without a server."""
    prompts = [turns[0] for turns in workload.make()]
    params = SamplingParams(temperature=0, max_tokens=workload.max_tokens, ignore_eos=True)
    llm.generate(prompts[:1], replace(params, max_tokens=WAKE_TOKENS), use_tqdm=False)
    began, used = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    began = time.perf_counter()
    llm.generate(prompts[:1], replace(params, max_tokens=1), use_tqdm=False)
    ttft = time.perf_counter() - began
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    return Figures(tokens / seconds, ttft, used / tokens)


def start_server(args: argparse.Namespace) -> Server:
    """Returns when it listens."""
    flags = ["--http-port", "0", "--grpc-port", "0", "--no-prefix-cache", "--warmup"]
    for name, value in engine_options(args).items():
        for one in value if isinstance(value, tuple) else (value,):
            if not isinstance(one, bool):
                flags += [f"--{name.replace('_', '-')}", str(one)]
    command = [sys.executable, "-c", "from serving.cli import main; main()", "serve"]
    process = subprocess.Popen(
        [*command, str(args.model), *flags], stderr=subprocess.PIPE, env=dict(os.environ)
    )
    assert process.stderr is not None
    urls: list[str] = []
    for line in process.stderr:
        if b'"listening"' in line:
            urls.append(json.loads(line)["url"])
        if len(urls) == 2:
            # Somebody has to read on, or the server waits at the next line of its log.
            threading.Thread(target=deque, args=(process.stderr, 0), daemon=True).start()
            return Server(process, urls[0], urls[1].removeprefix("grpc://"))
    raise SystemExit("the server did not start")


async def over_http(server: Server, workload: Workload) -> Figures:
    """A round of streams of server-sent events."""
    client = Client(server.http, json_model(server.http), extra={"ignore_eos": True})
    try:
        await client.session(workload.make()[0], WAKE_TOKENS)
        used = processor_seconds(server)
        results, seconds = await run(client, workload, Load(concurrency=workload.sessions))
        used = processor_seconds(server) - used
        report = summary(results, seconds)
        assert not report["failed"], report["errors"]
        (alone,) = await client.session(workload.make()[0], 1)
        tokens = report["output_tokens"]
        return Figures(tokens / seconds, alone.ttft or 0.0, used / tokens)
    finally:
        await client.close()


async def over_grpc(server: Server, workload: Workload) -> Figures:
    """A round of gRPC streams, all in one connection."""
    prompts = [turns[0] for turns in workload.make()]
    async with AsyncClient(server.grpc) as client:

        async def ask(prompt: str, max_tokens: int) -> int:
            options = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
            pieces = [len(e.token_ids) async for e in client.stream(prompt, **options)]
            return sum(pieces)

        await ask(prompts[0], WAKE_TOKENS)  # connects as well
        used, began = processor_seconds(server), time.perf_counter()
        tokens = sum(await asyncio.gather(*(ask(p, workload.max_tokens) for p in prompts)))
        seconds, used = time.perf_counter() - began, processor_seconds(server) - used
        began = time.perf_counter()
        await ask(prompts[0], 1)
        return Figures(tokens / seconds, time.perf_counter() - began, used / tokens)


def processor_seconds(server: Server) -> float:
    """That the server's process has used."""
    text = httpx.get(f"{server.http}/metrics").text
    return next(
        float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("process_cpu_seconds_total ")
    )


def json_model(url: str) -> str:
    """The name of the model at `url`."""
    return httpx.get(f"{url}/v1/models").json()["data"][0]["id"]


WAYS = {"http": over_http, "grpc": over_grpc}


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median and range."""
    values = sorted(values)
    return {"median": statistics.median(values), "least": values[0], "most": values[-1]}


def compare(local: list[Figures], there: list[Figures]) -> dict[str, Any]:
    """A way's rounds against those in process."""
    pairs = list(zip(local, there, strict=True))
    return {
        "tokens_per_second": spread(t.tokens_per_second for t in there),
        "ratio": spread(t.tokens_per_second / own.tokens_per_second for own, t in pairs),
        "ratio_per_processor_second": spread(
            own.processor_seconds_per_token / t.processor_seconds_per_token for own, t in pairs
        ),
        "added_ttft_seconds": spread(t.ttft_seconds - own.ttft_seconds for own, t in pairs),
    }


def main() -> None:
    """Prints a line per concurrency and way, and JSON with all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=bundled_model())
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-words", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(args.model, **engine_options(args))
    server = start_server(args)
    report = []
    for concurrency in args.concurrency:
        workload = Workload("random", concurrency, args.prompt_words, max_tokens=args.max_tokens)
        local: list[Figures] = []
        rounds: dict[str, list[Figures]] = {way: [] for way in WAYS}
        for _ in range(args.repeats + 1):
            local.append(in_process(llm, workload))
            for way, ask in WAYS.items():
                rounds[way].append(asyncio.run(ask(server, workload)))
        for way, figures in rounds.items():
            result = compare(local[1:], figures[1:])
            report.append({"concurrency": concurrency, "way": way, **result})
            ratio, work = result["ratio"], result["ratio_per_processor_second"]
            added = result["added_ttft_seconds"]["median"]
            print(
                f"{way} at {concurrency}: {ratio['median']:.3f} ({ratio['least']:.3f} to "
                f"{ratio['most']:.3f}) of the tokens a second, {work['median']:.3f} "
                f"({work['least']:.3f} to {work['most']:.3f}) of the tokens per processor second, "
                f"added TTFT {1000 * added:.2f} ms",
                flush=True,
            )
    print(json.dumps(report, indent=2))
    llm.close()
    server.process.terminate()
    server.process.wait()


if __name__ == "__main__":
    main()
