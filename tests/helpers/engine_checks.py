"""What every engine test needs: requests, an oracle with stop conditions, and a strict drive."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.types import Request, TokenEvent, TokenLogprob
from hybrid_jax.sampling_params import SamplingParams
from hybrid_jax.specs import CacheSpec
from tests.helpers.fake_runner import FakeRunner, toy_token

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    """Greedy parameters that only `max_tokens` ends, unless `options` say otherwise."""
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **options}  # type: ignore[arg-type]
    )


def prompt_of(length: int, seed: int = 0, vocab_size: int = 97) -> tuple[int, ...]:
    """A prompt that differs from others' in every place."""
    return tuple((seed * 31 + k * k + 7 * k) % vocab_size for k in range(length))


def small_config(**options: object) -> EngineConfig:
    """Tiny limits; `options` replace any of them."""
    values = {
        "max_num_seqs": 3,
        "max_model_len": 64,
        "max_num_batched_tokens": 16,
        "page_size": 4,
        **options,
    }
    return EngineConfig(**values)  # type: ignore[arg-type]


def expected_tokens(
    request: Request, specs: Iterable[CacheSpec], *, seed: int = 0, max_model_len: int = 64
) -> list[int]:
    """The oracle's outputs of one completion, its stop conditions included (no stop strings)."""
    specs, params = tuple(specs), request.params
    tokens, outputs = list(request.prompt_token_ids), []
    limit = min(params.max_tokens, max_model_len - len(tokens))
    while len(outputs) < limit:
        token = toy_token(tokens, specs, params, seed, 97)
        tokens.append(token)
        outputs.append(token)
        may_stop = len(outputs) > params.min_tokens
        if may_stop and (token in params.stop_token_ids or (token == 1 and not params.ignore_eos)):
            break
    return outputs


@dataclass
class Record:
    """All events of a drive, by completion."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    text: dict[tuple[str, int], str] = field(default_factory=dict)
    ends: dict[tuple[str, int], TokenEvent] = field(default_factory=dict)
    finals: dict[str, TokenEvent] = field(default_factory=dict)
    prompts: dict[str, tuple[TokenLogprob | None, ...]] = field(default_factory=dict)

    def add(self, events: Iterable[TokenEvent]) -> None:
        """Records events; fails on any event after the last one."""
        for event in events:
            key = (event.request_id, event.index)
            assert key not in self.ends, f"{key} has an event after its last one: {event}"
            assert event.request_id not in self.finals, f"{event} after the final event"
            self.tokens.setdefault(key, []).extend(event.new_token_ids)
            self.text[key] = self.text.get(key, "") + event.text
            if event.prompt_logprobs is not None:
                assert event.request_id not in self.prompts, f"{event} tells its prompt again"
                assert key[0] not in {name for name, _ in self.ends}
                self.prompts[event.request_id] = event.prompt_logprobs
            if event.finish_reason is not None:
                self.ends[key] = event
            if event.final:
                self.finals[event.request_id] = event


def drive(
    engine: Engine,
    *,
    record: Record | None = None,
    before_step: Callable[[int], None] = lambda step: None,
    until: int = 0,
    max_steps: int = 5000,
) -> Record:
    """Steps until nothing is left, at least `until` steps; integrity is checked after each."""
    record = record or Record()
    step = 0
    while engine.has_work() or step < until:
        before_step(step)
        record.add(engine.step())
        engine.check_integrity()
        step += 1
        assert step < max_steps, "the engine does not come to an end"
    return record


def assert_baseline(engine: Engine, runner: FakeRunner) -> None:
    """Nothing is held, nobody runs or waits, and the runner saw nothing wrong."""
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert [group.used for group in stats.caches] == [0] * len(stats.caches)
    engine.check_integrity()
    assert runner.sampling_rows.rows == {}
    assert runner.violations == []
