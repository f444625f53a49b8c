"""What the HTTP server costs: tokens a second against `LLM.generate` in process, and added TTFT.

    python -m benchmarks.serving_overhead --model path/to/model

For each concurrency both ways run the same prompts, greedy, one after the other, `--repeats` times,
alternating; the medians are reported. Each way has a process of its own, started once. The client
runs on the same machine and takes its share of the cores. Processor seconds per token, of the
process with the model only, hardly depend on what else runs there.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from hybrid_jax.bundled import bundled_model
from serving.bench import Client, Load, Workload, run, summary

FIGURES = ("tokens_per_second", "ttft_seconds", "processor_seconds_per_token")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The same for both ways. Without the prefix cache, or later repeats would be cheaper."""
    return {
        "max_num_seqs": max(args.concurrency),
        "max_model_len": args.max_model_len,
        "row_buckets": tuple(args.concurrency),
        "max_num_batched_tokens": 512,
        "token_buckets": (512,),
        "prefix_cache": False,
        "warmup": True,
    }


def in_process(pipe: Connection, args: argparse.Namespace) -> None:
    """Answers prompts with tokens a second, TTFT of the first alone, processor s per token."""
    from hybrid_jax import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    with LLM(args.model, **engine_options(args)) as llm:
        pipe.send("ready")
        while (prompts := pipe.recv()) is not None:
            began, used = time.perf_counter(), time.process_time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds, used = time.perf_counter() - began, time.process_time() - used
            began = time.perf_counter()
            stream = llm.stream(prompts[0], params)
            ttft = time.perf_counter() if any(event.text for event in stream) else 0.0
            tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
            pipe.send((tokens / seconds, ttft - began, used / tokens))


def start_server(args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], str]:
    """A server process and its URL."""
    flags = ["--http-port", "0", "--no-prefix-cache", "--warmup"]
    for name, value in engine_options(args).items():
        for one in value if isinstance(value, tuple) else (value,):
            if not isinstance(one, bool):
                flags += [f"--{name.replace('_', '-')}", str(one)]
    command = [sys.executable, "-c", "from serving.cli import main; main()", "serve"]
    server = subprocess.Popen(
        [*command, str(args.model), *flags], stderr=subprocess.PIPE, env=dict(os.environ)
    )
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(rb'"url": "([^"]+)"', line):
            return server, found[1].decode()
    raise SystemExit("the server did not start")


async def over_http(url: str, workload: Workload, concurrency: int) -> tuple[float, ...]:
    """The same three figures of the server."""
    used = processor_seconds(url)
    client = Client(url, json_model(url), extra={"ignore_eos": True})
    try:
        results, seconds = await run(client, workload, Load(concurrency=concurrency))
        used = processor_seconds(url) - used
        alone = await client.session(workload.make()[0], 1)
        report = summary(results, seconds)
        assert not report["failed"], report["errors"]
        per_token = used / report["output_tokens"]
        return report["output_tokens_per_second"], alone[0].ttft or 0.0, per_token
    finally:
        await client.close()


def processor_seconds(url: str) -> float:
    """That the server's process has used."""
    text = httpx.get(f"{url}/metrics").text
    return next(
        float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("process_cpu_seconds_total ")
    )


def json_model(url: str) -> str:
    """The name of the model at `url`."""
    return httpx.get(f"{url}/v1/models").json()["data"][0]["id"]


def main() -> None:
    """Prints one line of figures per concurrency, and JSON with all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=bundled_model())
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-words", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    here, there = multiprocessing.get_context("spawn").Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=in_process, args=(there, args))
    worker.start()
    assert here.recv() == "ready"
    server, url = start_server(args)
    figures = []
    for concurrency in args.concurrency:
        workload = Workload("random", concurrency, args.prompt_words, max_tokens=args.max_tokens)
        rows = []
        for _ in range(args.repeats + 1):
            here.send([turns[0] for turns in workload.make()])
            rows.append((here.recv(), asyncio.run(over_http(url, workload, concurrency))))
        local, http = zip(*rows[1:], strict=True)  # the first is a warm-up
        figure = {
            "concurrency": concurrency,
            **{
                f"{way}_{name}": statistics.median(row[i] for row in measured)
                for way, measured in (("generate", local), ("http", http))
                for i, name in enumerate(FIGURES)
            },
        }
        figures.append(figure)
        ratio = figure["http_tokens_per_second"] / figure["generate_tokens_per_second"]
        added = figure["http_ttft_seconds"] - figure["generate_ttft_seconds"]
        work = figure[f"generate_{FIGURES[2]}"] / figure[f"http_{FIGURES[2]}"]
        print(
            f"concurrency {concurrency}: {ratio:.3f} of the tokens a second, {work:.3f} of the "
            f"tokens per processor second, added TTFT {1000 * added:.2f} ms"
        )
    print(json.dumps(figures, indent=2))
    here.send(None)
    worker.join()
    server.terminate()
    server.wait()


if __name__ == "__main__":
    main()
