"""Prometheus metrics. Names are vLLM's where the meaning is, with hybrid_jax: for vllm:."""

from collections.abc import Iterable

import jax
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import hybrid_jax
from hybrid_jax.engine.types import TokenEvent
from hybrid_jax.errors import (
    GrammarError,
    NonFiniteLogits,
    NothingToSample,
    StateOwnerMismatch,
    StepFailed,
)
from hybrid_jax.inspection import kernel_report
from serving.async_engine import AsyncEngine, TokenStream

PREFIX = "hybrid_jax:"
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)  # seconds
_SLOW = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)  # seconds
_TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32_768, 131_072)
_ERRORS = (StateOwnerMismatch, NonFiniteLogits, NothingToSample, GrammarError, StepFailed)
_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """What is counted as it happens, and what is read from the engine when somebody asks."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        ProcessCollector(registry=self.registry)
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _SLOW
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a completion.", _FAST
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", _SLOW
        )
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self._output = self._histogram("request_generation_tokens", "Output tokens.", _TOKENS)
        self._prompt_total = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._output_total = self._counter("generation_tokens", "Output tokens.")
        self._finished = self._labelled("request_success", "Completions by end.", "finished_reason")
        self._errors = self._labelled("request_errors", "Completions that failed.", "error")
        self._hits = self._labelled(
            "prefix_hit_tokens", "Tokens found in the caches, by why not more.", "reason"
        )
        self._prompts = self._labelled("prefix_hit_prompts", "Prompts likewise.", "reason")
        self._http = Counter(
            f"{PREFIX}http_requests",
            "Answers by method, route and status; 0: none was sent.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        for reason in _REASONS:
            self._finished.labels(model_name, reason)
        for error in _ERRORS:
            self._errors.labels(model_name, error.__name__)

    def watch(self, engine: AsyncEngine) -> None:
        """Reports `engine`'s counters from now on."""
        self.registry.register(_EngineCollector(engine, self._model_name))

    def answered(self, method: str, route: str, status: int) -> None:
        """Counts an answer over HTTP."""
        self._http.labels(method, route, status).inc()

    def observe(self, stream: TokenStream, event: TokenEvent, now: float) -> None:
        """Counts an event; an observer of `AsyncEngine`."""
        if event.new_token_ids:
            self._output_total.inc(len(event.new_token_ids))
            if stream.first_token_at is None:
                self._ttft.observe(now - stream.arrived)
            elif (last := stream.last_token_at.get(event.index)) is not None:
                self._itl.observe(now - last)
        if event.finish_reason is not None:
            self._finished.labels(self._model_name, event.finish_reason).inc()
        if event.error is not None:
            self._errors.labels(self._model_name, type(event.error).__name__).inc()
        if event.cache is not None:
            self._hits.labels(self._model_name, event.cache.reason).inc(event.cache.cached_tokens)
            self._prompts.labels(self._model_name, event.cache.reason).inc()
        if event.usage is not None:
            self._e2e.observe(now - stream.arrived)
            self._prompt.observe(event.usage.prompt_tokens)
            self._output.observe(event.usage.completion_tokens)
            self._prompt_total.inc(event.usage.prompt_tokens)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        full = PREFIX + name
        metric = Histogram(full, text, ("model_name",), buckets=buckets, registry=self.registry)
        return metric.labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(PREFIX + name, text, ("model_name",), registry=self.registry)
        return metric.labels(self._model_name)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name", label), registry=self.registry)


class _EngineCollector(Collector):
    """Reads the engine when the metrics are asked for, so that steps pay nothing."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        """No names in advance: the engine is not asked for its counters before it runs."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All families, from one snapshot."""
        stats = self._engine.stats()
        yield self._gauge("num_requests_running", "Sequences that run.", stats.running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", stats.waiting)
        yield self._gauge(
            "step_stalled_seconds", "Of the current step.", self._engine.stalled_seconds()
        )
        yield self._count("num_preemptions", "Sequences put back.", stats.preemptions)
        yield self._count(
            "recomputed_tokens", "Computed again after a preemption.", stats.recomputed_tokens
        )
        yield self._count("swapped_out", "Sequences saved to the host.", stats.swap.num_out)
        yield self._count("swapped_in", "Those that came back from there.", stats.swap.num_in)
        for field in ("total", "used", "peak"):
            value = getattr(stats.swap, f"{field}_bytes")
            yield self._gauge(f"swap_{field}_bytes", "Host memory for preempted sequences.", value)
        guessed = stats.speculation
        yield self._count(
            "spec_decode_num_drafts",
            "Decode steps of a sequence, with guesses or none.",
            guessed.num_verified,
        )
        yield self._count(
            "spec_decode_num_draft_tokens", "Tokens guessed and verified.", guessed.draft_tokens
        )
        yield self._count(
            "spec_decode_num_accepted_tokens", "Those that were right.", guessed.accepted_tokens
        )
        yield self._count("steps", "Steps launched.", stats.steps)
        yield self._count("compiles", "Steps compiled.", stats.compiles)
        yield self._count("prefix_cache_queries", "Tokens looked up.", stats.prompt_tokens)
        yield self._count("prefix_cache_hits", "Tokens found.", stats.cached_tokens)
        phases = CounterMetricFamily(
            f"{PREFIX}step_phase_seconds", "Time of steps.", labels=("model_name", "phase")
        )
        for phase, seconds in stats.phase_seconds.items():
            phases.add_metric((self._model_name, phase), seconds)
        yield phases
        for field, text in (
            ("total", "Pages, slots or rows."),
            ("used", "Those that requests hold."),
            ("cached", "Those kept for reuse only."),
            ("peak", "Most used at once."),
            ("fragmentation", "Share of token places in used pages that hold no token."),
        ):
            family = GaugeMetricFamily(
                f"{PREFIX}cache_{field}", text, labels=("model_name", "cache_class")
            )
            for group in stats.caches:
                family.add_metric((self._model_name, group.name), getattr(group, field))
            yield family
        yield self._kernels()
        versions = GaugeMetricFamily(
            f"{PREFIX}build_info", "Versions.", labels=("version", "jax_version")
        )
        versions.add_metric((hybrid_jax.__version__, jax.__version__), 1)
        yield versions

    def _kernels(self) -> Metric:
        labels = ("op", "implementation", "operands", "refused")
        family = GaugeMetricFamily(f"{PREFIX}kernel_info", "What runs each op.", labels=labels)
        for row in kernel_report():
            operands = " ".join(f"{name}={value}" for name, value in row.operands.items())
            refused = "; ".join(f"{name}: {reason}" for name, reason in row.refused.items())
            family.add_metric((row.op, row.implementation, operands, refused), 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _count(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family
