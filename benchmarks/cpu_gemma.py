"""Greedy decode and prefill speed on the CPU: hybrid_jax beside transformers and llama.cpp.

Every engine runs in a process of its own and keeps its model loaded; the driver asks one engine
at a time, in turns (A B C A B C ...), and prints one JSON line per record. ``README.md`` beside
this file says how the figures are made and how to repeat them.
"""

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent / "peers"
TICKS = os.sysconf("SC_CLK_TCK")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_tile", "amx_bf16")

Record = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """How to start one engine."""

    name: str
    worker: str
    python: str
    model: str
    extra: tuple[str, ...] = ()


@dataclass
class Worker:
    """A running engine."""

    spec: Spec
    process: subprocess.Popen[str]
    facts: Record

    @classmethod
    def start(cls, spec: Spec, args: argparse.Namespace) -> "Worker":
        """Starts the process and waits until its model is loaded."""
        command = [spec.python, str(PEERS / spec.worker), "--model", spec.model]
        command += ["--threads", str(args.threads), "--max-batch", str(max(args.batches))]
        command += ["--max-len", str(args.max_len), *spec.extra]
        log = None if args.verbose else subprocess.DEVNULL
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        return cls(spec, process, _answer(process, spec.name))

    def ask(self, prompts: list[list[int]], max_tokens: int) -> Record:
        """Runs one request."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        return _answer(self.process, self.spec.name)

    def stop(self) -> None:
        """Ends the process by closing its input."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _answer(process: subprocess.Popen[str], name: str) -> Record:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{name} ended early; repeat with --verbose to see its messages")
    return json.loads(line)


# --- how busy the machine is -------------------------------------------------------------------


def machine_seconds() -> float:
    """CPU seconds all processes have used (stolen time counts), from /proc/stat."""
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / TICKS


def process_seconds(pid: int) -> float:
    """CPU seconds of one process with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@dataclass
class Load:
    """Cores used by anyone but the driver and one worker, since the object was made."""

    pid: int
    since: tuple[float, float, float] = field(init=False)

    def __post_init__(self) -> None:
        self.since = self._now()

    def _now(self) -> tuple[float, float, float]:
        own = process_seconds(self.pid) + process_seconds(os.getpid())
        return machine_seconds(), own, time.perf_counter()

    def others(self) -> float:
        """Mean number of cores the others used."""
        busy, own, clock = (now - then for now, then in zip(self._now(), self.since, strict=True))
        return max(0.0, (busy - own) / clock)


def wait_quiet(pid: int, args: argparse.Namespace) -> None:
    """Waits for a second in which the others leave the machine alone, up to the limit."""
    end = time.perf_counter() + args.wait_quiet
    while time.perf_counter() < end:
        load = Load(pid)
        time.sleep(1)
        if load.others() <= args.max_others:
            return


def machine_facts() -> Record:
    """What the figures depend on."""
    info = Path("/proc/cpuinfo").read_text()
    lines = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    values = {key.strip(): value.strip() for key, value in lines.items()}
    present = values.get("flags", "").split()
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
    return {
        "record": "machine",
        "cpu": f"{values.get('model name')} family {values.get('cpu family')}",
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in CPU_FLAGS if flag in present],
        "memory_gib": round(memory, 1),
        "kernel": platform.release(),
        "nice": os.nice(0),
        "load_average": os.getloadavg(),
    }


# --- the measurement ---------------------------------------------------------------------------


def make_prompts(batch: int, length: int, seed: str) -> list[list[int]]:
    """Random token ids behind the start token: no run sees the prompt of an earlier one."""
    draw = random.Random(seed)
    return [[2] + [draw.randrange(1000, 200_000) for _ in range(length - 1)] for _ in range(batch)]


def measure(worker: Worker, batch: int, turn: int, args: argparse.Namespace) -> Record:
    """One run of one engine."""
    prompts = make_prompts(batch, args.prompt_tokens, f"{args.seed}/{batch}/{turn}")
    if turn >= 0:
        wait_quiet(worker.process.pid, args)
    # Idle virtual cores wake slowly, and an engine under load does not idle: wake them first.
    worker.ask(make_prompts(batch, args.prompt_tokens, f"{args.seed}/{batch}/{turn}/wake"), 2)
    load = Load(worker.process.pid)
    answer = worker.ask(prompts, args.new_tokens)
    others = load.others()
    return {
        "record": "run",
        "engine": worker.spec.name,
        "batch": batch,
        "turn": turn,
        "decode": round(batch * (args.new_tokens - 1) / answer["decode_s"], 2),
        "prefill": round(batch * args.prompt_tokens / answer["prefill_s"], 2),
        "others": round(others, 2),
        "clean": others <= args.max_others,
        "tokens": answer["tokens"],
    }


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many leading tokens agree."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


def run_batch(workers: list[Worker], batch: int, args: argparse.Namespace) -> list[Record]:
    """All turns of one batch size, until every engine has its clean runs or the turns are up."""
    for worker in workers:
        for turn in range(args.warmup):
            measure(worker, batch, -1 - turn, args)
    runs: list[Record] = []
    limit = args.repeats + (args.extra_turns if args.discard_noisy else 0)
    for turn in range(limit):
        for worker in workers:
            run = measure(worker, batch, turn, args)
            runs.append(run)
            emit({key: value for key, value in run.items() if key != "tokens"}, args)
            if not run["clean"]:
                warn(f"{run['engine']}: other processes used {run['others']} cores in this run")
        complete = turn + 1 >= args.repeats and all(
            sum(run["clean"] for run in runs if run["engine"] == worker.spec.name) >= args.repeats
            for worker in workers
        )
        if complete:
            break
    return runs


def kept(runs: list[Record], args: argparse.Namespace) -> tuple[list[Record], bool]:
    """The runs that count, and whether they are all clean."""
    clean = [run for run in runs if run["clean"]]
    if not args.discard_noisy:
        return runs, len(clean) == len(runs)
    return (clean, True) if clean else (runs, False)


def summarise(runs: list[Record], names: list[str], args: argparse.Namespace) -> list[Record]:
    """Medians and ranges per engine, and the ratio of the first engine to each other one."""
    records: list[Record] = []
    reference = next((name for name in names if name.startswith("transformers")), names[0])
    truth = {run["turn"]: run["tokens"] for run in runs if run["engine"] == reference}
    batch = runs[0]["batch"]
    for name in names:
        used, clean = kept([run for run in runs if run["engine"] == name], args)
        if args.discard_noisy and not clean:
            warn(f"no clean run of {name} at batch {batch}: its figures are noisy ones")
        record: Record = {"record": "summary", "batch": batch, "engine": name}
        for phase in ("decode", "prefill"):
            values = [run[phase] for run in used]
            record[phase] = round(statistics.median(values), 1)
            record[f"{phase}_range"] = [min(values), max(values)]
        agree = [
            common_prefix(one, other)
            for run in used
            for one, other in zip(run["tokens"], truth[run["turn"]], strict=True)
        ]
        record |= {"runs": len(used), "clean": clean}
        record |= {"same_tokens": round(statistics.mean(agree), 1), "as": reference}
        records.append(record)
    return records + [ratio(runs, names[0], peer, args) for peer in names[1:]]


def ratio(runs: list[Record], product: str, peer: str, args: argparse.Namespace) -> Record:
    """The median over the turns of one engine's speed divided by the other's."""
    by_turn, clean = {}, True
    for name in (product, peer):
        used, all_clean = kept([run for run in runs if run["engine"] == name], args)
        by_turn[name] = {run["turn"]: run for run in used}
        clean = clean and all_clean
    turns = sorted(by_turn[product].keys() & by_turn[peer].keys())
    record: Record = {"record": "ratio", "batch": runs[0]["batch"], "engine": product}
    record |= {"peer": peer, "paired_turns": len(turns), "clean": clean}
    for phase in ("decode", "prefill"):
        pairs = [by_turn[product][turn][phase] / by_turn[peer][turn][phase] for turn in turns]
        record[phase] = round(statistics.median(pairs), 3) if pairs else None
        record[f"{phase}_range"] = [round(min(pairs), 3), round(max(pairs), 3)] if pairs else None
    return record


# --- output ------------------------------------------------------------------------------------


def warn(message: str) -> None:
    """A warning on standard error."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def emit(record: Record, args: argparse.Namespace) -> None:
    """One JSON line on standard output and, if asked for, in a file."""
    line = json.dumps(record)
    print(line, flush=True)
    if args.out:
        with Path(args.out).open("a") as file:
            file.write(line + "\n")


def table(records: list[Record], phase: str, batches: list[int]) -> str:
    """A Markdown table of medians and ranges."""
    found = {(r["engine"], r["batch"]): r for r in records if r["record"] == "summary"}
    names = list(dict.fromkeys(name for name, _ in found))
    lines = [f"| {phase}, tokens/s | " + " | ".join(f"batch {b}" for b in batches) + " |"]
    lines.append("|---" * (len(batches) + 1) + "|")
    for name in names:
        cells = []
        for batch in batches:
            record = found[name, batch]
            low, high = record[f"{phase}_range"]
            mark = "" if record["clean"] else " (noisy)"
            cells.append(f"{record[phase]} ({low:.1f} – {high:.1f}){mark}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- the command line --------------------------------------------------------------------------


def specs(args: argparse.Namespace) -> list[Spec]:
    """The engines asked for; the first one is what the ratios compare."""
    short = {"bfloat16": "bf16", "float32": "f32"}.get(args.dtype, args.dtype)
    dtype = ("--dtype", args.dtype)
    found = [Spec(f"hybrid_jax {short}", "hybrid_jax_worker.py", sys.executable, args.model, dtype)]
    for item in args.hybrid_gguf:
        name, _, path = item.partition("=")
        found.append(
            Spec(f"hybrid_jax {name}", "hybrid_jax_worker.py", sys.executable, path, dtype)
        )
    peer = args.peer_python
    found.append(Spec(f"transformers {short}", "transformers_worker.py", peer, args.model, dtype))
    if args.compile:
        extra = (*dtype, "--compile")
        name = f"transformers {short} compiled"
        found.append(Spec(name, "transformers_worker.py", peer, args.model, extra))
    for item in args.gguf:
        name, _, path = item.partition("=")
        extra = ("--kv-unified",) if args.kv_unified else ()
        found.append(Spec(f"llama.cpp {name}", "llamacpp_worker.py", peer, path, extra))
    chosen = [spec for spec in found if any(word in spec.name for word in args.only or [""])]
    if not chosen:
        raise SystemExit(f"--only leaves none of {[spec.name for spec in found]}")
    return chosen


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", required=True, help="Hugging Face directory of Gemma-3-270M")
    p.add_argument("--gguf", action="append", default=[], metavar="NAME=PATH", help="for llama.cpp")
    p.add_argument("--hybrid-gguf", action="append", default=[], metavar="NAME=PATH")
    p.add_argument("--peer-python", required=True, help="interpreter with the peers installed")
    p.add_argument("--only", action="append", metavar="WORD", help="engines whose name has it")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--compile", action="store_true", help="also transformers with torch.compile")
    p.add_argument("--kv-unified", action="store_true", help="llama.cpp: one cache for all")
    p.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    p.add_argument("--prompt-tokens", type=int, default=128)
    p.add_argument("--new-tokens", type=int, default=64)
    p.add_argument("--repeats", type=int, default=5, help="turns of all engines")
    p.add_argument("--extra-turns", type=int, default=5, help="turns to replace discarded runs")
    p.add_argument("--warmup", type=int, default=2, help="uncounted runs per batch size")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--max-others", type=float, default=1 / 3, help="cores others may use in a run")
    p.add_argument("--discard-noisy", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--wait-quiet", type=float, default=30, help="most seconds to wait for a run")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", help="append the JSON lines to this file")
    p.add_argument("--verbose", action="store_true", help="show what the engines print")
    args = p.parse_args(arguments)
    args.max_len = -(-(args.prompt_tokens + args.new_tokens) // 256) * 256
    return args


def main() -> None:
    """Starts the engines, measures and reports."""
    args = parse()
    chosen = specs(args)
    emit(machine_facts(), args)
    settings = {key: value for key, value in vars(args).items() if "python" not in key}
    emit({"record": "settings"} | settings, args)
    workers: list[Worker] = []
    records: list[Record] = []
    try:
        for spec in chosen:
            workers.append(Worker.start(spec, args))
            emit({"record": "engine", "engine": spec.name} | workers[-1].facts, args)
        for batch in args.batches:
            runs = run_batch(workers, batch, args)
            for record in summarise(runs, [spec.name for spec in chosen], args):
                emit(record, args)
                records.append(record)
    finally:
        for worker in workers:
            worker.stop()
    for phase in ("decode", "prefill"):
        print(table(records, phase, args.batches), file=sys.stderr)


if __name__ == "__main__":
    main()
