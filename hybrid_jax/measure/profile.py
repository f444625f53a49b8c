"""Where the time of a step goes: by layer, kind of layer and op, against the work each has to do.

The engine runs real prefill and decode steps under `jax.profiler`. The trace has times of HLO
instructions; the compiled step says in which named scopes each was traced. What is fused across
scopes counts for its last one; what cannot be attributed has a line of its own.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import jax

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import EngineStats, TokenEvent
from hybrid_jax.inspection import kernel_report
from hybrid_jax.loading import LoadedModel
from hybrid_jax.measure.requests import at_least_one, random_requests
from hybrid_jax.measure.scopes import OTHER_MODULES, UNATTRIBUTED, Place, op_names, place_of
from hybrid_jax.measure.trace import Trace, record, summarise
from hybrid_jax.measure.work import Work, step_work
from hybrid_jax.runtime.batch import StepBatch, StepKind, StepOutput
from hybrid_jax.runtime.runner import Runner, open_model
from hybrid_jax.runtime.sampling import SamplingTable

Phase = Literal["prefill", "decode"]
MODULE = "jit_step"  # XLA's name of the compiled step


@dataclass(frozen=True)
class ProfileLine:
    """One part of the step, per step."""

    layer: int | None
    kind: str  # of layer, or a name of what lies outside of them
    op: str
    seconds: float
    flops: float
    nbytes: float


class Share(NamedTuple):
    """Some parts of the step together: seconds per step, and shares of the whole step."""

    seconds: float
    time: float
    flops: float
    nbytes: float


@dataclass(frozen=True)
class PhaseProfile:
    """Steps of one phase. Everything is per step; times of parts add up to `op_seconds`."""

    phase: Phase
    steps: int
    rows: int
    tokens: int  # per step
    lines: tuple[ProfileLine, ...]
    seconds: float  # from the first operation of a run of steps to the last
    busy_seconds: float  # of it, with any operation running
    gap_seconds: float  # of it, between two steps: the host was late
    host_seconds: dict[str, float]  # of the host's phases, see `StepClock`

    @property
    def op_seconds(self) -> float:
        """Of all operations; more than `busy_seconds` if some run side by side."""
        return sum(line.seconds for line in self.lines)

    def by(self, *fields: Literal["layer", "kind", "op"]) -> dict[tuple[Any, ...], Share]:
        """Shares of the lines that agree in some fields, the longest first. Each adds up to 1."""
        sums: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for line in self.lines:
            total = sums[tuple(getattr(line, field) for field in fields)]
            for i, value in enumerate((line.seconds, line.flops, line.nbytes)):
                total[i] += value
        whole = [sum(column) or 1.0 for column in zip(*sums.values(), strict=True)]
        shares = {
            key: Share(total[0], *(value / all_ for value, all_ in zip(total, whole, strict=True)))
            for key, total in sums.items()
        }
        return dict(sorted(shares.items(), key=lambda item: -item[1].seconds))

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self) | {"op_seconds": self.op_seconds}


def measure_profile(
    model: str | Path,
    *,
    rows: int = 4,
    prompt_tokens: int = 128,
    steps: int = 16,
    dtype: str = "auto",
    **engine_options: Any,
) -> tuple[PhaseProfile, PhaseProfile]:
    """Profiles prefill and decode steps of a model on the device at hand.

    Args:
        model: a Hugging Face directory, an Orbax checkpoint or a GGUF file.
        rows: sequences at once.
        prompt_tokens: of each; all prompts together are prefilled in as many steps as they need.
        steps: decode steps that count.
        dtype: of weights and activations; "auto" takes the checkpoint's.
        **engine_options: fields of `EngineConfig`, but no buckets: there is one of each kind.

    Raises:
        ModelError, ValueError, InvalidRequest: as for `LLM` and its requests.
        HybridJaxError: the device's trace tells no HLO operations.
    """
    for name, value in (("rows", rows), ("prompt_tokens", prompt_tokens), ("steps", steps)):
        at_least_one(name, value)
    options = {
        "max_model_len": prompt_tokens + steps + _WARM,
        "max_num_batched_tokens": rows * prompt_tokens,
        "prefix_cache": False,  # which cuts prompts where it keeps a state
        **engine_options,
        "max_num_seqs": rows,
        "row_buckets": (rows,),
    }
    options["token_buckets"] = (max(rows, options["max_num_batched_tokens"]),)
    config = EngineConfig.of(options)
    with _scopes_in_compilation_cache():
        runner = _RecordingRunner(open_model(model, dtype=dtype, config=config), config)
        _drain(_engine(runner, [(prompt_tokens, 2)] * rows, seed=0))  # compiles
        prefill = _profile_prefill(runner, rows, prompt_tokens)
        return prefill, _profile_decode(runner, rows, prompt_tokens, steps)


_WARM = 4  # decode steps that do not count
_PREFILLS = 4  # rounds of prompts


@contextmanager
def _scopes_in_compilation_cache() -> Iterator[None]:
    """Or a step could come from there with the scopes of other code: its key leaves them out."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = jax.config.values[name]
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


class _RecordingRunner(Runner):
    """Keeps a batch of every kind of step."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.batches: dict[StepKind, StepBatch] = {}

    def step(self, batch: StepBatch, sampling: SamplingTable) -> StepOutput:
        """As `Runner.step`."""
        self.batches[batch.kind] = batch
        return super().step(batch, sampling)


def _profile_prefill(runner: _RecordingRunner, rows: int, prompt_tokens: int) -> PhaseProfile:
    engine = _engine(runner, [(prompt_tokens, 1)] * (rows * _PREFILLS), seed=1)
    before = engine.stats()
    trace = summarise(record(lambda: _drain(engine)), MODULE)
    work = step_work(
        runner.model_config, runner.plan.dtype, rows=rows, earlier=0, new=prompt_tokens
    )
    share = _PREFILLS / trace.runs  # of the prompts of a round; 1 unless they are cut
    work = {place: Work(*(share * n for n in done)) for place, done in work.items()}
    tokens = round(share * rows * prompt_tokens)
    host = _host_seconds(before, engine.stats())
    return _phase("prefill", runner, StepKind.MIXED, trace, work, host, rows=rows, tokens=tokens)


def _profile_decode(
    runner: _RecordingRunner, rows: int, prompt_tokens: int, steps: int
) -> PhaseProfile:
    engine = _engine(runner, [(prompt_tokens, steps + _WARM)] * rows, seed=2)
    counts: Counter[str] = Counter()
    while len(counts) < rows or min(counts.values()) < 2:  # then every step decodes
        counts.update(event.request_id for event in _step(engine) if event.new_token_ids)
    before = engine.stats()
    trace = summarise(record(lambda: _drain(engine)), MODULE, last=steps)
    host = _host_seconds(before, engine.stats())
    middle = prompt_tokens + _WARM - 1 + steps // 2
    work = step_work(runner.model_config, runner.plan.dtype, rows=rows, earlier=middle, new=1)
    return _phase("decode", runner, StepKind.DECODE, trace, work, host, rows=rows, tokens=rows)


def _phase(
    phase: Phase,
    runner: _RecordingRunner,
    kind: StepKind,
    trace: Trace,
    work: Mapping[Place, Work],
    host: Mapping[str, float],
    *,
    rows: int,
    tokens: int,
) -> PhaseProfile:
    """Puts together the times of a trace and the work of one of its steps, by place."""
    names = op_names(runner.compiled(runner.batches[kind]).as_text() or "")
    ops = {choice.op for choice in kernel_report()}
    times: dict[Place, float] = defaultdict(float)
    times[Place(None, UNATTRIBUTED, UNATTRIBUTED)] = 0.0
    times[Place(None, OTHER_MODULES, OTHER_MODULES)] = trace.other_seconds
    for instruction, seconds in trace.self_seconds.items():
        times[place_of(names.get(instruction, ""), ops)] += seconds
    nothing = Work(0.0, 0.0)
    lines = [
        ProfileLine(*place, times.get(place, 0.0) / trace.runs, *work.get(place, nothing))
        for place in dict.fromkeys([*times, *work])
    ]
    return PhaseProfile(
        phase=phase,
        steps=trace.runs,
        rows=rows,
        tokens=tokens,
        lines=tuple(lines),
        seconds=trace.wall / trace.runs,
        busy_seconds=trace.busy / trace.runs,
        gap_seconds=trace.gap / max(1, trace.runs - 1),
        host_seconds=dict(host),
    )


def _host_seconds(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Of each phase of the host, per step launched between two snapshots."""
    steps = after.steps - before.steps
    return {
        str(name): (seconds - before.phase_seconds[name]) / steps
        for name, seconds in after.phase_seconds.items()
    }


def _engine(runner: Runner, lengths: list[tuple[int, int]], seed: int) -> Engine:
    """A fresh engine with random requests of (prompt tokens, output tokens)."""
    engine = Engine(runner, None)
    for request in random_requests(lengths, runner.model_config.vocab_size, Random(seed)):
        engine.add_request(request)
    return engine


def _drain(engine: Engine) -> None:
    while engine.has_work():
        _step(engine)


def _step(engine: Engine) -> list[TokenEvent]:
    events = engine.step()
    for event in events:
        if event.error is not None:
            raise event.error
    return events
