"""Measures a server with OpenAI's API, this one or another: latencies, throughput, goodput."""

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from hybrid_jax.fields import INT32_MAX, integer
from hybrid_jax.measure.requests import RequestTimes, latencies

WorkloadName = Literal["random", "shared-prefix", "multi-turn"]
Session = Sequence[str]  # what a client says, one turn after another
_SYLLABLES = tuple(a + b for a in "bdklmn" for b in "aeio")


@dataclass(frozen=True)
class Workload:
    """What is asked. Texts are random words, so that any tokenizer will do.

    `random`: one prompt per session. `shared-prefix`: the same, after a beginning that all have in
    common. `multi-turn`: conversations, whose turns repeat all that was said before.
    """

    name: WorkloadName = "random"
    sessions: int = 100
    prompt_words: int = 100
    prefix_words: int = 500  # shared-prefix only
    turns: int = 4  # multi-turn only
    max_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sessions", "prompt_words", "turns", "max_tokens"):
            integer(1, INT32_MAX, "use 1 or more")(name, getattr(self, name))
        integer(0, INT32_MAX, "use 0 for none")("prefix_words", self.prefix_words)

    def make(self) -> list[Session]:
        """The sessions; the same for the same fields."""
        rng = random.Random(f"{self.name} {self.seed}")
        prefix = _words(rng, self.prefix_words) if self.name == "shared-prefix" else ""
        turns = self.turns if self.name == "multi-turn" else 1
        return [
            [f"{prefix} {_words(rng, self.prompt_words)}".strip() for _ in range(turns)]
            for _ in range(self.sessions)
        ]


@dataclass(frozen=True)
class Load:
    """When it is asked: `rate` sessions a second, Poisson, or `concurrency` at any time."""

    rate: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("give either a rate (open loop) or a concurrency (closed loop)")
        if not 0 < (self.rate or self.concurrency or 0) < math.inf:
            raise ValueError(f"rate and concurrency must be positive, got {self}")


class Client:
    """Asks one server."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str = "none",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """`extra` fields go into every request, for example `{"ignore_eos": True}`."""
        self._model = model
        self._extra = dict(extra or {})
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(None, connect=30),
            limits=httpx.Limits(max_connections=None),
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def session(self, turns: Session, max_tokens: int) -> list[RequestTimes]:
        """All turns, each after the answer to the one before; an error ends the session."""
        results: list[RequestTimes] = []
        messages: list[dict[str, str]] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            if len(turns) == 1:
                result = await self._ask("/v1/completions", {"prompt": turn}, max_tokens)
            else:
                body = {"messages": list(messages)}
                result = await self._ask("/v1/chat/completions", body, max_tokens)
            results.append(result)
            if result.error is not None:
                break
            messages.append({"role": "assistant", "content": result.text})
        return results

    async def _ask(self, path: str, body: dict[str, Any], max_tokens: int) -> RequestTimes:
        result, sent = RequestTimes(), time.perf_counter()
        body |= {"model": self._model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}} | self._extra
        last = sent
        try:
            async for chunk in self._stream(path, body):
                now = time.perf_counter()
                if usage := chunk.get("usage"):
                    result.prompt_tokens = usage["prompt_tokens"]
                    result.output_tokens = usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    result.cached_tokens = details.get("cached_tokens") or 0
                if text := _text(chunk):
                    result.text += text
                    if result.ttft is None:
                        result.ttft = now - sent
                    else:
                        result.gaps.append(now - last)
                    last = now
        except (httpx.HTTPError, ValueError, KeyError) as error:
            result.error = f"{type(error).__name__}: {error}"
        result.e2e = time.perf_counter() - sent
        return result

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise ValueError(f"{response.status_code} {response.text[:200]}")
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise ValueError(f"in the stream: {chunk['error']}")
                    yield chunk


async def run(client: Client, workload: Workload, load: Load) -> tuple[list[RequestTimes], float]:
    """Runs the whole workload; all results, and the seconds it took."""
    sessions = workload.make()
    results: list[RequestTimes] = []
    slots = asyncio.Semaphore(load.concurrency or len(sessions) or 1)
    rng = random.Random(f"arrivals {workload.seed}")

    async def one(turns: Session) -> None:
        async with slots:
            results.extend(await client.session(turns, workload.max_tokens))

    began = due = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for turns in sessions:
            if load.rate is not None:
                due += rng.expovariate(load.rate)
                await asyncio.sleep(due - time.perf_counter())
            tasks.create_task(one(turns))
    return results, time.perf_counter() - began


def summary(
    results: Sequence[RequestTimes], seconds: float, slo: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """What a run came to.

    Args:
        results: of all requests.
        seconds: that the run took.
        slo: most seconds of `ttft`, `tpot` and `e2e` for a request to count for goodput.
    """
    good = [r for r in results if r.error is None]
    errors: dict[str, int] = {}
    for result in results:
        if result.error is not None:
            errors[result.error] = errors.get(result.error, 0) + 1
    report: dict[str, Any] = {
        "requests": len(results),
        "failed": len(results) - len(good),
        "errors": errors,
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "prompt_tokens": sum(r.prompt_tokens for r in good),
        "cached_tokens": sum(r.cached_tokens for r in good),
        "output_tokens": sum(r.output_tokens for r in good),
        "output_tokens_per_second": sum(r.output_tokens for r in good) / seconds,
        **latencies(good),
    }
    if slo:
        met = sum(all(_within(r, name, most) for name, most in slo.items()) for r in good)
        report["slo_seconds"] = dict(slo)
        report["goodput_requests_per_second"] = met / seconds
    return report


def _within(result: RequestTimes, name: str, most: float) -> bool:
    value = getattr(result, name)
    return value is not None and value <= most


def _text(chunk: Mapping[str, Any]) -> str:
    if not chunk.get("choices"):
        return ""
    choice = chunk["choices"][0]
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def _words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices(_SYLLABLES, k=2)) for _ in range(count))
