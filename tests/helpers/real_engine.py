"""Real runners of tiny models for engine tests: engines on them, the oracle, poison, traffic.

Compiling is what costs time here, so one runner serves many engines: the engine sees it through a
view that may have fewer rows and smaller pools than the device arrays.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.cache.arrays import CacheSizes, LayerCache, layer_specs
from hybrid_jax.cache.plan import pages_for, table_width
from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request, Tokenizer
from hybrid_jax.generate import generate
from hybrid_jax.loading import LoadedModel, load_model
from hybrid_jax.runtime.batch import Carry
from hybrid_jax.runtime.runner import Runner
from hybrid_jax.specs import StateSpec, WindowSpec
from pallas_kernels.storage import encode, value_dtype
from tests.helpers import tiny
from tests.helpers.engine_checks import Record, greedy

PAGE, CHUNK, MAX_LEN, ROWS = 4, 16, 64, 5
GARBAGE = 2**30  # a token id that no vocabulary has, an owner that nobody is


def engine_config(**options: Any) -> EngineConfig:
    """Few buckets and small arrays; `options` replace any of them."""
    values = {
        "max_num_seqs": ROWS,
        "max_model_len": MAX_LEN,
        "max_num_batched_tokens": CHUNK,
        "page_size": PAGE,
        "row_buckets": (ROWS,),
        "token_buckets": (CHUNK,),
        "max_logprobs": 2,
        "max_logit_bias": 2,
        "cache_bytes": 2**30,
        **options,
    }
    return EngineConfig(**values)


class _View:
    """A runner with some of its facts replaced; everything else is the runner's."""

    def __init__(self, runner: Runner, config: EngineConfig, sizes: CacheSizes) -> None:
        self._runner = runner
        self.config = config
        self.sizes = sizes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class Rig:
    """A tiny checkpoint in float32 on a real runner whose fresh caches are NaN."""

    def __init__(self, name: str, directory: Path, **options: Any) -> None:
        self.directory = tiny.write_checkpoint(name, directory / name, seed=0)
        ranges = options.get("kv_ranges", "")
        self.model = load_model(self.directory, dtype="float32", kv_ranges=ranges)
        self.oracle = Oracle(self.model)
        self.runner = Runner(self.model, engine_config(**options), fill=float("nan"))

    def engine(
        self,
        *,
        longest: int | None = None,
        spare: int = 0,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> Engine:
        """A new engine on fresh NaN caches.

        Args:
            longest: pools just hold one sequence of so many tokens, and `spare` more ids.
            spare: see `longest`.
            tokenizer: see `Engine`.
            **options: fields of `EngineConfig` that change no compiled shape.
        """
        config = replace(self.runner.config, **options)
        sizes = self.runner.sizes
        if longest is not None:
            sizes = CacheSizes(PAGE, tuple(self._small(longest, spare, config)))
        for row in range(1, self.runner.config.max_num_seqs + 1):
            self.runner.sampling_rows.clear_row(row)
        self.runner.reset()
        return Engine(_View(self.runner, config, sizes), tokenizer)

    def _small(self, longest: int, spare: int, config: EngineConfig) -> Iterator[int]:
        for group, most in zip(self.runner.groups, self.runner.sizes.counts, strict=True):
            if isinstance(group.spec, StateSpec):
                need = config.max_num_seqs * config.tokens_per_decode
            else:
                pages = pages_for(longest + config.num_speculative_tokens, PAGE)
                if isinstance(group.spec, WindowSpec):
                    pages = min(pages, table_width(group.spec, config))
                need = pages + spare
            yield min(need + 1, most)

    def assert_clean(self, engine: Engine) -> None:
        """Nothing is held, nobody runs or waits, and every row samples greedily again."""
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert [group.used for group in stats.caches] == [0] * len(stats.caches)
        engine.check_integrity()
        table = self.runner.sampling_rows.device()
        assert not np.asarray(table.temperature).any()
        assert (np.asarray(table.bias_ids) == -1).all()


class Oracle:
    """Greedy continuations by `hybrid_jax.generate`, each computed once."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        known = self._known.setdefault(prompt, [])
        if len(known) < max_tokens:
            known += generate(self._model, [*prompt, *known], max_tokens - len(known))
        return known[:max_tokens]

    def check(
        self, record: Record, requests: list[Request], aborted: set[str] = frozenset()
    ) -> None:  # type: ignore[assignment]
        """Every request ended once, with the oracle's tokens or, aborted, with their beginning."""
        for request in requests:
            key = (request.request_id, 0)
            tokens, reason = record.tokens[key], record.ends[key].finish_reason
            expected = self(request.prompt_token_ids, request.params.max_tokens)
            if reason == "abort":
                assert request.request_id in aborted
                expected = expected[: len(tokens)]
            else:
                assert reason == "length", f"{key} ended with {record.ends[key]}"
            assert tokens == expected, f"{key}: prompt of {len(request.prompt_token_ids)} tokens"


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    """Token ids without a pattern, the same on every machine."""
    rng = random.Random(f"{length} {seed}")
    return tuple(rng.randrange(2, tiny.VOCAB_SIZE) for _ in range(length))


def border_lengths() -> list[int]:
    """Prompt lengths around the borders of pages and chunks, and those below the convolution's."""
    around = [k * size + d for size, k in ((PAGE, 2), (CHUNK, 1), (CHUNK, 2)) for d in range(-1, 4)]
    return sorted({1, 2, 3, *around})


def random_requests(rng: random.Random, count: int, *, most_new: int = 12) -> list[Request]:
    """Greedy requests of border lengths. Few prompts, so that the oracle knows most of them."""
    lengths = border_lengths()
    return [
        Request(
            f"r{i}",
            random_prompt(rng.choice(lengths), rng.randrange(2)),
            greedy(rng.randint(1, most_new)),
        )
        for i in range(count)
    ]


def schedule_of(
    engine: Engine,
    requests: list[Request],
    rng: random.Random,
    *,
    last_arrival: int = 10,
    abort_share: float = 0.0,
    aborted: set[str] | None = None,
    after: Callable[[], None] = lambda: None,
) -> Callable[[int], None]:
    """A `before_step` for `drive`: requests arrive, and some are aborted, at random steps.

    `after` runs before every step, for poison. `aborted` collects the ids that were aborted.
    """
    arrivals = {r.request_id: rng.randint(0, last_arrival) for r in requests}
    aborts = {
        name: arrivals[name] + rng.randint(0, 12) for name in arrivals if rng.random() < abort_share
    }

    def before_step(step: int) -> None:
        for request in requests:
            name = request.request_id
            if arrivals[name] == step:
                engine.add_request(request)
            if aborts.get(name) == step and engine.abort(name) and aborted is not None:
                aborted.add(name)
        after()

    return before_step


def poison(engine: Engine, runner: Runner) -> None:
    """Fills every free page, slot and row of the carry, the null ones included, with garbage."""
    cache = engine._cache
    masks = []
    for i, count in enumerate(runner.sizes.counts):
        group: Any = cache.page_groups.get(i) or cache.state_groups[i]
        masks.append(_free_ids(group.pool, count))
    layers = tuple(i for i, _ in layer_specs(runner.groups))
    states = tuple(cache.state_groups)
    rows = _free_ids(cache.rows, runner.config.max_num_seqs + 1)
    runner._carry = _fill(layers, states, runner._carry, tuple(masks), rows)


def _free_ids(pool: Any, count: int) -> np.ndarray:
    return np.array([k >= pool.size or pool.is_free(k) for k in range(count)])


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _fill(
    layers: tuple[int, ...], states: tuple[int, ...], carry: Carry, masks: Any, rows: jax.Array
) -> Carry:
    def cover(array: jax.Array, mask: jax.Array) -> jax.Array:
        wide = mask.reshape(-1, *(1 for _ in array.shape[1:]))
        if array.dtype == jnp.int32:
            return jnp.where(wide, jnp.int32(GARBAGE), array)
        nan = encode(jnp.full((), jnp.nan, value_dtype(array.dtype)), array.dtype)
        return jnp.where(wide, nan, array)

    caches: list[LayerCache] = [
        jax.tree.map(lambda array, mask=masks[i]: cover(array, mask), layer)
        for i, layer in zip(layers, carry.caches, strict=True)
    ]
    owners = tuple(cover(o, masks[i]) for i, o in zip(states, carry.owners, strict=True))
    return Carry(tuple(caches), owners, cover(carry.last_token, rows), cover(carry.history, rows))


@contextmanager
def compile_log() -> Iterator[list[str]]:
    """Collects the names of JAX's tracing and compiling events inside the `with` block."""
    events: list[str] = []
    active = True

    def listen(name: str, seconds: float, **details: Any) -> None:
        del seconds, details
        if active and name.startswith("/jax/core/compile/"):
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        active = False  # listeners cannot be taken out again by public means
