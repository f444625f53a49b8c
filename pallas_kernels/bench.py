"""Times the implementations of an op on its cases, on the device at hand.

    python -m pallas_kernels.bench gated_delta_rule --case qwen35_9b --rows 16 --json figures.json
    python -m pallas_kernels.bench gated_delta_rule --case qwen35_9b --rows 16 --tune
    python -m pallas_kernels.bench gated_delta_rule --case qwen35_9b --tokens 1024 --chip v6e

Every implementation that can run a case here is compiled and run first. Then they take turns, so
that a drift of the machine meets all of them: medians and ranges over the rounds, and the ratio to
the reference as the median of the ratios within rounds. Pools are donated, as in an engine's step.

`--tune` times the block sizes that the chosen kernels can have instead, in the same way, and keeps
the best for this kind of device (`pallas_kernels/tuning.py`).

`--chip` names a TPU that need not be there. What the chosen kernels take on it, or with `--tune`
what their block sizes do, is then estimated by libtpu's static profile
(`pallas_kernels/static_profile.py`).
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import platform, registry, static_profile, tuning
from pallas_kernels.bench_operands import OPS, Batch, Call, call_bytes, cases_of, make_call

MOST = 2**30  # rows, or tokens
SAMPLE_SECONDS = 0.02  # a sample is as many calls as take about so long
WORTH = 0.02  # what a tuned size must gain: less is noise


@dataclass(frozen=True)
class Timing:
    """One implementation of an op on one case and batch; seconds of a call."""

    op: str
    case: str
    batch: Batch
    implementation: str
    chosen: bool  # whether the registry would choose it here
    refused: str | None = None  # why it cannot run; then there are no times
    seconds: tuple[float, ...] = ()  # one per round
    ratio: float | None = None  # to the reference in the same rounds, median; above 1: slower

    @property
    def median(self) -> float:
        """Of all rounds."""
        return statistics.median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        numbers = asdict(self)
        if self.seconds:
            numbers |= {"median": self.median, "range": (min(self.seconds), max(self.seconds))}
        return numbers


def batches(rows: int, context: int, tokens: int) -> tuple[Batch, Batch]:
    """A decode step of `rows` sequences of `context` tokens, and the prefill of one of `tokens`."""
    for name, value, least in (("rows", rows, 1), ("context", context, 1), ("tokens", tokens, 2)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}; use {least} or more")
        if value > MOST:
            raise ValueError(f"{name} must be at most {MOST}, got {value}; use fewer")
    return Batch(rows, context, 1), Batch(1, 0, tokens)


def time_op(
    *ops: str,
    cases: Sequence[str] = (),
    rows: int = 16,
    context: int = 1024,
    tokens: int = 512,
    rounds: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Times every implementation of an op on a decode and a prefill batch of each case.

    Args:
        ops: names of `OPS`; of several, all are checked before the first is timed.
        cases: names from each op's `cases.py`; none: all of them.
        rows: of the decode batch. context: tokens of each row before the step.
        tokens: of the prefill batch.
        rounds: samples of each implementation.

    Raises:
        ValueError: an op or case is unknown, or a number is too small or too large for this memory.
    """
    wanted = [(op, *x) for op in ops for x in _wanted(op, cases, rows, context, tokens, rounds)]
    return [timing for what in wanted for timing in _time_case(*what, rounds, clock)]


def _wanted(
    op: str, cases: Sequence[str], rows: int, context: int, tokens: int, rounds: int
) -> list[tuple[Any, Batch]]:
    """The cases and batches to time; raises what `time_op` says."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; known: {', '.join(sorted(OPS))}")
    known = {case.name: case for case in cases_of(op)}
    for name in cases:
        if name not in known:
            raise ValueError(f"{op} has no case {name!r}; known: {', '.join(known)}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}; use 1 or more")
    both = batches(rows, context, tokens)

    def batches_of(case: Any) -> tuple[Batch, ...]:
        # `rows` has no tokens, and copies at most half of a pool.
        return (Batch(min(rows, (case.shape[0] - 1) // 2), 0, 1),) if op == "rows" else both

    wanted = [(known[name], batch) for name in cases or known for batch in batches_of(known[name])]
    for case, batch in wanted:
        _check_bytes(op, case, batch)
    return wanted


def profile_op(
    op: str,
    *,
    chip: str,
    cases: Sequence[str] = (),
    rows: int = 16,
    context: int = 1024,
    tokens: int = 512,
    cpu_seconds: int = static_profile.CPU_SECONDS,
) -> list[static_profile.Profile]:
    """What the chosen kernels of an op take on a TPU that need not be there.

    Other arguments and errors are those of `time_op`.

    Args:
        chip: one of `static_profile.TARGETS`.
        cpu_seconds: for one kernel, at most.

    Raises:
        ValueError: as `time_op`, and if `chip` is none of them or there is no compiler for it.
    """
    if cpu_seconds < 1:
        raise ValueError(f"cpu-seconds must be at least 1, got {cpu_seconds}; use 1 or more")
    profiles: list[static_profile.Profile] = []
    with static_profile.targeting(chip):
        for case, batch in _wanted(op, cases, rows, context, tokens, 1):
            trial = static_profile.Trial(op, case.name, batch, chip)
            call = make_call(op, case, batch)
            profiles += static_profile.profile_kernels(call, trial, cpu_seconds)
    return profiles


def _time_case(
    op: str, case: Any, batch: Batch, rounds: int, clock: Callable[[], float]
) -> list[Timing]:
    """Every implementation on one case and batch."""
    call = make_call(op, case, batch)
    with registry.recording() as choices:
        jax.eval_shape(call.run, call.pool, **call.operands)
    chosen = choices[-1].implementation
    implementations = registry.implementations(op, choices[-1].facts.platform)
    refused: dict[str, str] = {}
    samplers: dict[str, _Sampler] = {}
    for name in implementations:
        try:
            samplers[name] = _Sampler(call, name, clock)
        except ValueError as error:  # what the registry raises for one that cannot run
            refused[name] = str(error)
    seconds = _take_turns(samplers, rounds)
    base = seconds.get(registry.REFERENCE)
    timings = []
    for name in implementations:
        times = tuple(seconds.get(name, ()))
        ratio = None
        if times and base:
            ratio = statistics.median(a / b for a, b in zip(times, base, strict=True))
        timings.append(
            Timing(op, case.name, batch, name, name == chosen, refused.get(name), times, ratio)
        )
    return timings


@dataclass(frozen=True)
class Tuned:
    """A block size of the chosen kernel on one case and batch."""

    key: str  # of `tuning.pick`
    case: str
    batch: Batch
    by: str  # `tuning.TIME` or `tuning.STATIC`
    costs: Mapping[int, float]  # by size: seconds of a call, median, or cycles of its kernel
    default: int
    size: int  # what is to be used
    failed: Mapping[int, str] = field(default_factory=dict)  # sizes without a cost, and why

    def entry(self) -> dict[str, Any]:
        """For the file of tuned sizes."""
        entry = {"size": self.size, "by": self.by, "jax": jax.__version__}
        if self.by == tuning.TIME:
            return entry | {"seconds": self.costs}
        return entry | {"cycles": self.costs, "libtpu": metadata.version("libtpu")}

    def costs_line(self) -> str:
        """Milliseconds or cycles by size."""
        scale, unit = (1e3, ".3f") if self.by == tuning.TIME else (1, ",.0f")
        return ", ".join(f"{size}: {scale * cost:{unit}}" for size, cost in self.costs.items())


def tune_op(
    op: str,
    *,
    cases: Sequence[str] = (),
    rows: int = 16,
    context: int = 1024,
    tokens: int = 512,
    rounds: int = 7,
    chip: str = "",
    clock: Callable[[], float] = time.perf_counter,
    report: Callable[[Tuned], None] = lambda tuned: None,
) -> list[Tuned]:
    """Tries the block sizes of what the registry chooses, one parameter at a time.

    A size other than the kernel's own is used only if it is better by `WORTH`. Kernels without such
    parameters give nothing. Other arguments and errors are those of `time_op`.

    Args:
        chip: one of `static_profile.TARGETS`, which need not be there: by the static profile of its
            compiler. Empty: by time on the device at hand.
        report: called with every result at once, so that an interrupt loses no more than one.

    Raises:
        ValueError: as `time_op`, and if `chip` is none of them or there is no compiler for it.
    """
    wanted = _wanted(op, cases, rows, context, tokens, rounds)
    found: dict[str, Tuned] = {}
    with static_profile.targeting(chip) if chip else contextlib.nullcontext():
        for case, batch in wanted:
            call = make_call(op, case, batch)
            with tuning.asking() as questions:
                jax.eval_shape(call.run, call.pool, **call.operands)
            for key, (candidates, default) in questions.items():
                if key in found or not _matters(call, key, candidates):
                    continue
                if chip:
                    trial = static_profile.Trial(op, case.name, batch, chip, key, default)
                    costs, failed = static_profile.profile_sizes(call, trial, candidates)
                else:
                    costs, failed = _time_sizes(call, key, candidates, rounds, clock), {}
                size = _best(costs, default)
                by = tuning.STATIC if chip else tuning.TIME
                found[key] = Tuned(key, case.name, batch, by, costs, default, size, failed)
                report(found[key])
    return list(found.values())


def _matters(call: Call, key: str, candidates: Sequence[int]) -> bool:
    """Whether a size changes what runs: kernels ask for sizes of batches of other kinds, too."""
    traced = set()
    for size in candidates:
        with tuning.trying({key: size}):
            # A fresh function: what was traced before would not be traced again.
            jaxpr = jax.make_jaxpr(lambda pool, given: call.run(pool, **given))
            traced.add(str(jaxpr(call.pool, call.operands)))
    return len(traced) > 1


def _time_sizes(
    call: Call, key: str, candidates: Sequence[int], rounds: int, clock: Callable[[], float]
) -> dict[int, float]:
    """Medians of the seconds of a call, by size."""
    samplers = {}
    for size in candidates:
        with tuning.trying({key: size}):
            samplers[size] = _Sampler(call, None, clock)
    taken = _take_turns(samplers, rounds)
    return {size: statistics.median(times) for size, times in taken.items()}


def _best(costs: Mapping[int, float], default: int) -> int:
    """The size of least cost, if that is worth it."""
    if default not in costs:
        return default
    best = min(costs, key=costs.__getitem__)
    return best if costs[best] < (1 - WORTH) * costs[default] else default


def _take_turns(samplers: dict[Any, "_Sampler"], rounds: int) -> dict[Any, list[float]]:
    """Seconds of a call in each round, of each."""
    seconds: dict[Any, list[float]] = {name: [] for name in samplers}
    for turn in range(rounds):
        order = list(samplers) if turn % 2 else list(reversed(samplers))
        for name in order:
            seconds[name].append(samplers[name].sample())
    return seconds


def _check_bytes(op: str, case: Any, batch: Batch) -> None:
    """Raises ValueError if the device, or the host if it has no memory of its own, is too small."""
    stats = jax.local_devices()[0].memory_stats() or {}
    most = stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    need = call_bytes(op, case, batch)
    if need > most:
        raise ValueError(
            f"{op} on {case.name} with {batch.rows:,} rows of {batch.earlier + batch.new:,} tokens "
            f"takes {need:,} bytes and there are {most:,}; use fewer"
        )


class _Sampler:
    """One implementation, compiled and warm, with a pool of its own."""

    def __init__(self, call: Call, implementation: str | None, clock: Callable[[], float]) -> None:
        def run(pool: Any, operands: dict[str, Any]) -> tuple[Any, Any]:
            return call.run(pool, **operands, implementation=implementation)

        self._step = jax.jit(run, donate_argnums=0)
        self._clock = clock
        self._operands = call.operands
        self._pool = jax.tree.map(jnp.copy, call.pool)
        self._calls = 1
        self.sample()  # compiles
        self._calls = max(1, round(SAMPLE_SECONDS / max(self.sample(), 1e-6)))

    def sample(self) -> float:
        """Seconds of a call: several in a row, each on the pool that the one before left."""
        began = self._clock()
        out = None
        for _ in range(self._calls):
            out, self._pool = self._step(self._pool, self._operands)
        jax.block_until_ready((out, self._pool))
        return (self._clock() - began) / self._calls


def timing_report(timings: Sequence[Timing]) -> dict[str, Any]:
    """With the device and the version of JAX, for JSON."""
    device = platform.current()
    return {
        "device": device._asdict(),
        "jax": jax.__version__,
        "timings": [timing.to_dict() for timing in timings],
    }


def timing_lines(timings: Sequence[Timing]) -> list[tuple[str, ...]]:
    """Per timing: case, batch, implementation, median and range in milliseconds, ratio."""
    rows = []
    for timing in timings:
        what = _in_words(timing.batch)
        name = f"{timing.implementation}{' (chosen)' if timing.chosen else ''}"
        if timing.refused is not None:
            rows.append((timing.case, what, name, "-", timing.refused, "-"))
            continue
        low, high = 1e3 * min(timing.seconds), 1e3 * max(timing.seconds)
        ratio = "-" if timing.ratio is None else f"{timing.ratio:.2f}"
        spread = f"{low:.3f} - {high:.3f}"
        rows.append((timing.case, what, name, f"{1e3 * timing.median:.3f}", spread, ratio))
    return rows


def profile_report(profiles: Sequence[static_profile.Profile], chip: str) -> dict[str, Any]:
    """With the chip and the versions of JAX and libtpu, for JSON."""
    return {
        "chip": chip,
        "jax": jax.__version__,
        "libtpu": metadata.version("libtpu"),
        "profiles": [asdict(profile) for profile in profiles],
    }


def profile_lines(profiles: Sequence[static_profile.Profile], chip: str) -> list[tuple[str, ...]]:
    """Per kernel: case, batch, name, cycles, and microseconds, also those of its bytes alone."""
    megahertz = static_profile.TARGETS[chip].megahertz
    rows = []
    for x in profiles:
        cycles, time = "-", x.failed
        if x.cycles is not None:
            cycles, time = f"{x.cycles:,}", f"{x.cycles / megahertz:.1f}"
        least = f"{x.least / megahertz:.1f}"
        rows.append((x.case, _in_words(x.batch), x.kernel, cycles, least, time))
    return rows


def _in_words(batch: Batch) -> str:
    if batch.new == 1:
        return f"decode {batch.rows} x {batch.earlier:,}"
    return f"prefill {batch.new:,}"


PROFILE_HEADER = ("case", "batch", "kernel", "cycles", "us of its bytes", "us")
TIMING_HEADER = ("case", "batch", "implementation", "ms", "range", "to reference")


NOTHING = "nothing is written"


class _Stopped(BaseException):
    """SIGINT or SIGTERM. It passes all that runs, and `subprocess.run` ends its process for it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.kept = NOTHING  # what became of the figures


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Within, a first SIGINT or SIGTERM raises `_Stopped`; a second one ends the process."""

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        for each in heard:
            signal.signal(each, signal.SIG_DFL)
        raise _Stopped(number)

    both = signal.SIGINT, signal.SIGTERM
    heard = [each for each in both if signal.getsignal(each) is not signal.SIG_IGN]
    earlier = {each: signal.signal(each, stop) for each in heard}
    try:
        yield
    finally:
        for each, handler in earlier.items():
            signal.signal(each, handler)


def main() -> None:
    """Runs the command; exit code 128 and the signal's number if one stopped it."""
    with _stoppable():
        try:
            _run(_parser())
        except _Stopped as stopped:
            name = signal.Signals(stopped.number).name
            _parser().exit(128 + stopped.number, f"bench: stopped by {name}; {stopped.kept}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time the implementations of an op on its cases.")
    parser.add_argument("op", help=", ".join(sorted(OPS)))
    parser.add_argument("--case", action="append", default=[], help="default: all")
    parser.add_argument("--rows", type=int, default=16, help="of the decode batch")
    parser.add_argument("--context", type=int, default=1024, help="tokens of its rows before it")
    parser.add_argument("--tokens", type=int, default=512, help="of the prefill batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default="", help="file for the figures; -: stdout")
    parser.add_argument("--tune", action="store_true", help="time block sizes, keep the best")
    parser.add_argument("--chip", default="", help="estimate for this TPU, which need not be there")
    parser.add_argument(
        "--cpu-seconds", type=int, default=static_profile.CPU_SECONDS,
        help="--chip without --tune: to estimate one kernel, at most",
    )  # fmt: skip
    return parser


def _run(parser: argparse.ArgumentParser) -> None:
    """Does what the command line says."""
    args = parser.parse_args()
    if args.tune and args.json:
        parser.exit(2, "bench: --tune writes its figures where kernels look; leave out --json\n")
    target = Path(args.json)
    if target.is_dir() != (args.json == "") or not target.parent.is_dir():
        parser.exit(2, f"bench: --json {args.json!r} is no file in an existing directory\n")
    options = {name: getattr(args, name) for name in ("rows", "context", "tokens", "rounds")}
    try:
        if args.tune:
            _tune(args.op, args.chip, cases=args.case, **options)
            return
        report, table = _measure(args, options)
    except ValueError as error:
        parser.exit(2, f"bench: {error}\n")
    text = json.dumps(report, indent=2)
    if args.json == "-":
        print(text)
        return
    if args.json:
        try:
            target.write_text(text + "\n")
        except OSError as error:
            parser.exit(2, f"bench: {target} cannot be written: {error.strerror}\n{text}\n")
    _print_table(table)


def _measure(
    args: argparse.Namespace, options: dict[str, Any]
) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """Times, or static profiles for a chip: for JSON, and as a table."""
    if args.chip:
        del options["rounds"]
        profiles = profile_op(
            args.op, chip=args.chip, cases=args.case, cpu_seconds=args.cpu_seconds, **options
        )
        table = [PROFILE_HEADER, *profile_lines(profiles, args.chip)]
        return profile_report(profiles, args.chip), table
    timings = time_op(args.op, cases=args.case, **options)
    return timing_report(timings), [TIMING_HEADER, *timing_lines(timings)]


def _tune(op: str, chip: str, **options: Any) -> None:
    """Tunes, keeps what was found and says where."""
    kind = static_profile.find_target(chip).kind if chip else platform.current().kind
    try:
        tuning.check_writable(kind)  # rather fails now than with the figures
    except OSError as error:
        directory = tuning.user_directory()
        raise ValueError(f"{directory} cannot be written ({error}); set XDG_CACHE_HOME") from error
    tuned: list[Tuned] = []
    try:
        tune_op(op, chip=chip, report=tuned.append, **options)
    except _Stopped as stopped:
        stopped.kept = _keep(kind, tuned)
        raise
    if not tuned:
        remedy = "take others" if kind != "cpu" else "kernels for TPU and GPU have, see --chip"
        raise ValueError(
            f"what runs {op} on {kind} has no block sizes to tune for these cases; {remedy}"
        )
    print(_keep(kind, tuned))


def _keep(kind: str, tuned: Sequence[Tuned]) -> str:
    """Prints what was found for a device kind and writes what is to be kept; says where."""
    if not tuned:
        return NOTHING
    known, found = tuning.entries(kind), {}
    costs = "ms by size" if tuned[0].by == tuning.TIME else "cycles by size"
    rows = [("block size", "case", costs, "own rule", "kept")]
    for x in tuned:
        kept, earlier = str(x.size), known.get(x.key, {"by": x.by})
        if x.default not in x.costs:
            kept = "nothing: own rule has no figure"
        elif x.by == tuning.STATIC and earlier.get("by", tuning.TIME) == tuning.TIME:
            kept = f"{earlier['size']}, found by time"  # which is better than any estimate
        else:
            found[x.key] = x.entry()
        rows.append((x.key, x.case, x.costs_line(), str(x.default), kept))
    _print_table(rows)
    for x in tuned:
        for size, reason in x.failed.items():
            print(f"{x.key}: size {size} is left out: {reason}")
    return f"written to {tuning.write(kind, found)}" if found else NOTHING


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


if __name__ == "__main__":
    main()
