"""Metrics and /server_info say what happened: counted by hand and compared."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hybrid_jax.bundled import bundled_model
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request, SpeculationStats
from hybrid_jax.inspection import inspect_model, kernel_report
from serving.async_engine import AsyncEngine
from serving.client import Client
from serving.metrics import PREFIX, Metrics
from tests.helpers.engine_checks import greedy, small_config
from tests.helpers.fake_runner import FULL, STATE, FakeRunner
from tests.helpers.grpc_server import GrpcServer
from tests.helpers.http_server import HttpServer, LoopThread
from tests.serving.conftest import Bundled

Serve = Callable[..., HttpServer]

# Names that vLLM documents; each means the same here.
SHARED_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_prompt_tokens_sum",
    "request_generation_tokens_sum",
}


class Samples(dict[tuple[str, frozenset[str]], float]):
    """Values by name, without prefix, and the values of their labels."""

    def total(self, name: str, *labels: str) -> float:
        """The sum of the samples that have all of `labels`."""
        return sum(v for (n, have), v in self.items() if n == name and set(labels) <= have)


def scrape(server: HttpServer) -> Samples:
    response = httpx.get(f"{server.url}/metrics", timeout=60)
    assert response.headers["content-type"].startswith("text/plain")
    return Samples(
        {
            (sample.name.removeprefix(PREFIX), frozenset(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }
    )


def complete(server: HttpServer, **body: Any) -> Any:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()


def test_counters_grow_by_what_was_done(serve_bundled: Serve) -> None:
    server = serve_bundled()
    before = scrape(server)
    usage = complete(server, prompt="a b c", max_tokens=7, n=2, ignore_eos=True)["usage"]
    complete(server, prompt="d", max_tokens=1, ignore_eos=True)
    complete(server, prompt="d", max_tokens=0)
    after = scrape(server)

    def growth(name: str, *labels: str) -> float:
        return after.total(name, *labels) - before.total(name, *labels)

    assert {name for name, _ in after} >= SHARED_NAMES
    assert growth("generation_tokens_total") == growth("request_generation_tokens_sum") == 15
    assert growth("request_success_total", "length") == growth("request_success_total") == 3
    assert growth("e2e_request_latency_seconds_count") == 2
    assert growth("time_to_first_token_seconds_count") == 2
    assert growth("inter_token_latency_seconds_count") == 12
    prompts = usage["prompt_tokens"] + growth("request_prompt_tokens_sum", "lara-kjv")
    assert prompts - usage["prompt_tokens"] == growth("prompt_tokens_total")
    assert growth("http_requests_total", "/v1/completions", "200") == 2
    assert growth("http_requests_total", "/v1/completions", "400") == 1
    assert growth("steps_total") >= 8
    for phase in ("launch", "wait", "output"):
        assert growth("step_phase_seconds_total", phase) > 0
    assert after.total("num_requests_running") == after.total("num_requests_waiting") == 0


def test_a_prefix_hit_is_counted_with_its_reason(serve_bundled: Serve) -> None:
    server = serve_bundled()
    prompt = list(range(100, 400))
    complete(server, prompt=prompt, max_tokens=1)
    before = scrape(server)
    usage = complete(server, prompt=prompt, max_tokens=1)["usage"]
    after = scrape(server)
    found = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < found < 300
    for name in ("prefix_cache_hits_total", "prefix_hit_tokens_total"):
        assert after.total(name) - before.total(name) == found
    assert after.total("prefix_cache_queries_total") - before.total(
        "prefix_cache_queries_total"
    ) == len(prompt)


def test_caches_and_kernels_are_those_of_the_engine(serve_bundled: Serve, bundled: Bundled) -> None:
    samples, stats = scrape(serve_bundled()), bundled.engine.stats()
    for group in stats.caches:
        for field in ("total", "used", "cached", "peak", "fragmentation"):
            assert samples.total(f"cache_{field}", group.name) == getattr(group, field)
    assert samples.total("compiles_total") == stats.compiles
    kernels = [labels for name, labels in samples if name == "kernel_info"]
    assert {row.op for row in kernel_report()} >= {"paged_attention", "gated_delta_rule"}
    for row in kernel_report():
        assert any({row.op, row.implementation} <= labels for labels in kernels)


def test_failures_are_counted_by_their_kind(loop_thread: LoopThread) -> None:
    runner = FakeRunner((FULL, STATE), (40, 4), small_config())
    engine, metrics = Engine(runner, None), Metrics("toy")
    served = AsyncEngine(engine, None, observers=(metrics.observe,))
    metrics.watch(served)
    served.start()
    server = HttpServer(loop_thread, served, metrics)

    async def run(name: str) -> None:
        await served.generate(Request(name, (3, 4), greedy(4))).collect()

    assert scrape(server).total("request_errors_total") == 0
    runner.poisoned_uids.add(1)
    loop_thread.run(run("nan"))
    runner.launch_error = MemoryError("out of memory")
    loop_thread.run(run("raises"))
    samples = scrape(server)
    assert samples.total("request_errors_total", "NonFiniteLogits") == 1
    assert samples.total("request_errors_total", "StepFailed") == 1
    assert samples.total("request_errors_total", "StateOwnerMismatch") == 0
    assert samples.total("request_success_total", "error") == 2
    server.close()
    served.close()


def test_preemptions_say_what_was_saved_and_what_was_lost(loop_thread: LoopThread) -> None:
    """Two sequences, of which one has to wait for the other's pages."""
    runner = FakeRunner((FULL, STATE), (11, 4), small_config(swap_bytes=10_000, run_ahead=False))
    engine, metrics = Engine(runner, None), Metrics("toy")
    served = AsyncEngine(engine, None, observers=(metrics.observe,))
    metrics.watch(served)
    server = HttpServer(loop_thread, served, metrics)
    for i in range(2):
        engine.add_request(Request(f"r{i}", tuple(range(6 + i)), greedy(30)))
    while engine.has_work():
        engine.step()
    swap = engine.stats().swap
    samples = scrape(server)
    assert samples.total("num_preemptions_total") == samples.total("swapped_out_total") == 1
    assert samples.total("swapped_in_total") == 1
    assert samples.total("recomputed_tokens_total") == 0
    assert samples.total("swap_total_bytes") == 10_000
    assert samples.total("swap_peak_bytes") == swap.peak_bytes > 0
    assert samples.total("swap_used_bytes") == 0
    info = httpx.get(f"{server.url}/server_info").json()
    assert info["swap"]["num_in"] == 1 and info["recomputed_tokens"] == 0
    server.close()
    served.close()


def test_speculation_is_counted_under_the_names_of_vllm(loop_thread: LoopThread) -> None:
    engine, metrics = Engine(FakeRunner((FULL,), (11,), small_config()), None), Metrics("toy")
    engine._speculation.stats = lambda: SpeculationStats(5, 20, 12)  # type: ignore[method-assign]
    served = AsyncEngine(engine, None, observers=(metrics.observe,))
    metrics.watch(served)
    server = HttpServer(loop_thread, served, metrics)
    samples = scrape(server)
    names = ("drafts", "draft_tokens", "accepted_tokens")
    assert [samples.total(f"spec_decode_num_{name}_total") for name in names] == [5, 20, 12]
    server.close()
    served.close()


def test_server_info_describes_model_caches_and_kernels(
    serve_bundled: Serve, bundled: Bundled
) -> None:
    info = httpx.get(f"{serve_bundled().url}/server_info").json()
    kinds = [layer["kind"] for layer in info["layers"]]
    assert kinds == ["linear", "window", "linear", "full", "window"]
    assert info["max_model_len"] == info["engine"]["max_model_len"] == 512
    assert info["vocab_size"] == 2048 and info["model_type"] == "lara_mini"
    assert [c["name"] for c in info["caches"]] == [g.name for g in bundled.engine.stats().caches]
    assert {k["op"] for k in info["kernels"]} == {row.op for row in kernel_report()}
    assert all(k["implementation"] for k in info["kernels"]) and info["versions"]["jax"]


def test_memory_is_told_in_bytes(
    serve_bundled: Serve, serve_grpc: Callable[..., GrpcServer]
) -> None:
    info = httpx.get(f"{serve_bundled().url}/server_info").json()
    with Client(serve_grpc().address) as client:
        memory = client.memory()
    parameters = inspect_model(bundled_model(), dtype="float32").parameter_bytes
    assert memory.parameter_bytes == info["parameter_bytes"] == parameters
    classes = {cache["name"].split(":")[-1]: cache for cache in info["caches"]}
    # One full layer and two window layers: 16 tokens a page, keys and values, 2 heads of 64 floats.
    page = 16 * 2 * 2 * 64 * 4
    assert classes["full"]["unit_bytes"] == page and classes["window"]["unit_bytes"] == 2 * page
    # Two linear layers: a state of 4 x 32 x 32 floats, and the tail of the convolution.
    assert classes["linear"]["unit_bytes"] > 2 * 4 * 32 * 32 * 4
    assert classes["rows"]["array_bytes"] >= 9 * 512 * 4  # histories of 8 rows and the null row
    for cache, http in zip(memory.caches, info["caches"], strict=True):
        # With the null unit; the small arrays of the rows are not all of one entry per row.
        assert cache.name == "rows" or cache.array_bytes == cache.unit_bytes * (cache.total + 1)
        assert (cache.unit_bytes, cache.array_bytes) == (http["unit_bytes"], http["array_bytes"])


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
def test_the_format_is_negotiated(serve_bundled: Serve, accept: str) -> None:
    response = httpx.get(f"{serve_bundled().url}/metrics", headers={"Accept": accept})
    assert response.headers["content-type"].startswith(accept.split(";")[0])
