"""A runner without a model: the next token is a hash of all that the caches say about a row.

It reads and writes tokens through the page tables, slots and rows it is given, as late as the real
device may, so a wrong table, a leaked slot or a buffer changed too early gives wrong tokens. What
it can prove wrong on the spot goes to `violations`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid_jax.cache.arrays import CacheSizes, StateSlots
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.memory.snapshot import LiveBytes
from hybrid_jax.runtime.batch import StepBatch, StepKind, StepOutput
from hybrid_jax.runtime.logprobs import Logprobs
from hybrid_jax.sampling_params import SamplingParams
from hybrid_jax.specs import (
    AttentionSpec,
    CacheGroup,
    LayerSpec,
    MLPSpec,
    NormSpec,
    PagedSpec,
    StateArray,
    StateSpec,
    WindowSpec,
)

_MODULUS = 2**61 - 1
FULL = PagedSpec(1, 8, "float32")
STATE = StateSpec((StateArray("recurrent", (1, 4, 4), "float32"),))


def window(size: int) -> WindowSpec:
    """The spec of a window group."""
    return WindowSpec(1, 8, "float32", size)


def toy_model_config(vocab_size: int = 97, eos: tuple[int, ...] = (1,)) -> ModelConfig:
    """Enough of a model for the engine; its layers are never looked at."""
    norm = NormSpec("rms", 1e-6)
    layer = LayerSpec(AttentionSpec(1, 1, 8, 1.0), MLPSpec(8), norm)
    return ModelConfig("toy", vocab_size, 8, (layer,), norm, 4096, eos_token_ids=eos)


def _absorb(value: int, tokens: Iterable[int]) -> int:
    for token in tokens:
        value = (value * 6364136223846793005 + token + 1) % _MODULUS
    return value


def _choose(parts: list[int], params: SamplingParams, seed: int, vocab_size: int) -> int:
    value = _absorb(0, [*parts, 0 if params.greedy else seed + 1])
    return (value ^ (value >> 23)) % vocab_size


def toy_token(
    tokens: list[int],
    specs: Iterable[object],
    params: SamplingParams,
    seed: int,
    vocab_size: int,
) -> int:
    """The oracle: the token after `tokens`, from nothing but the tokens."""
    parts = []
    for spec in specs:
        seen = tokens[-spec.window :] if isinstance(spec, WindowSpec) else tokens
        parts.append(_absorb(0, seen))
    return _choose(parts, params, seed, vocab_size)


def toy_prompt_logprob(position: Any, token: Any) -> Any:
    """What a `FakeRunner` says about a prompt's token."""
    return -np.float32(position) - np.float32(token) / 128


class FakeSamplingRows:
    """Row parameters on the host; `device()` is a snapshot of them."""

    processors: tuple[str, ...] = ("known",)

    def __init__(self) -> None:
        self.rows: dict[int, tuple[SamplingParams, int, int]] = {}

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        prompt_len: int,
        *,
        stop_ids: Iterable[int] = (),
    ) -> None:
        self.rows[row] = (params, seed, prompt_len)

    def clear_row(self, row: int) -> None:
        self.rows.pop(row, None)

    def device(self) -> Any:
        return dict(self.rows)


class _Late:
    """An output array that is computed when somebody reads it."""

    def __init__(self, read: Callable[[], np.ndarray]) -> None:
        self._read = read

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._read()


@dataclass
class _Pending:
    batch: StepBatch
    sampling: dict[int, tuple[SamplingParams, int, int]]
    results: dict[str, np.ndarray] | None = None
    error: BaseException | None = None


class FakeRunner:
    """Implements `engine.types.StepRunner`. `counts` are pages or slots per spec, null included."""

    def __init__(
        self,
        specs: tuple[PagedSpec | WindowSpec | StateSpec, ...],
        counts: tuple[int, ...],
        config: EngineConfig,
        model_config: ModelConfig | None = None,
    ) -> None:
        self.model_config = model_config or toy_model_config()
        self.config = config.resolve(self.model_config)
        self.groups = tuple(CacheGroup(spec, (i,)) for i, spec in enumerate(specs))
        self.sizes = CacheSizes(config.page_size, counts)
        self.sampling_rows = FakeSamplingRows()
        self.violations: list[str] = []
        self.shapes: set[tuple[StepKind, int, int]] = set()
        self.launch_error: BaseException | None = None  # raised by the next `step`
        self.read_error: BaseException | None = None  # raised when the next step's output is read
        self.reset_error: Exception | None = None
        # By uid: their logits are NaN, or what they ask for leaves nothing to sample; or only after
        # so many tokens.
        self.poisoned_uids: set[int | tuple[int, int]] = set()
        self.unusable_uids: set[int | tuple[int, int]] = set()
        self.poisoned_rows: set[int] = set()
        self.num_units_read = self.num_units_written = 0  # pages and slots to and from the host
        self.reset()
        self._lost = False

    @property
    def num_compiles(self) -> int:
        return len(self.shapes)

    def live_bytes(self) -> LiveBytes:
        """As if every unit weighed what its spec says."""
        weights = [
            count * getattr(g.spec, "nbytes", 0)
            or count * self.sizes.page_size * g.spec.bytes_per_token  # type: ignore[union-attr]
            for g, count in zip(self.groups, self.sizes.counts, strict=True)
        ]
        return LiveBytes("toy", "float32", 1000, tuple(weights), 100, {})

    def prepare(self, batches: Iterable[StepBatch]) -> None:
        for batch in batches if self.config.warmup else ():
            self._run(_Pending(batch, {}))

    def reset(self) -> None:
        if self.reset_error is not None:
            raise self.reset_error
        rows, length = self.config.max_num_seqs + 1, self.config.max_positions
        self.cells = {}  # per page group: [P, G, (token, position)]
        self.states: dict[int, list[tuple[int, int] | None]] = {}  # per slot: (hash, tokens)
        self.owners: dict[int, np.ndarray] = {}
        for i, (group, count) in enumerate(zip(self.groups, self.sizes.counts, strict=True)):
            if isinstance(group.spec, StateSpec):
                self.states[i] = [None] * count
                self.owners[i] = np.zeros(count, np.int64)
            else:
                self.cells[i] = np.full((count, self.sizes.page_size, 2), -1, np.int64)
        self.last_token = np.full(rows, -1, np.int64)
        self.history = np.full((rows, length), -1, np.int64)
        self.pending: list[_Pending | Callable[[], None]] = []
        self._lost = False

    def step(self, batch: StepBatch, sampling: Any) -> StepOutput:
        if self._lost:
            raise RuntimeError("the carry was donated to a step that failed")
        if self.launch_error is not None:
            error, self.launch_error, self._lost = self.launch_error, None, True
            raise error
        step = _Pending(batch, sampling)
        if self.read_error is not None:
            step.error, self.read_error = self.read_error, None
        self.pending.append(step)
        late: Any = lambda name: _Late(lambda: self._read(step, name))  # noqa: E731
        names = ("tokens", "finite", "usable", "owner_ok")
        logprobs = Logprobs(late("chosen"), late("top_ids"), late("top"))
        prompt = None
        if batch.targets is not None:
            prompt = Logprobs(late("prompt_chosen"), late("prompt_top_ids"), late("prompt_top"))
        columns = {name: late(name) for name in names}
        return StepOutput(**columns, logprobs=logprobs, prompt_logprobs=prompt)

    def set_history(self, row: int, token_ids: Sequence[int]) -> None:
        tokens = list(token_ids)

        def run() -> None:
            self.history[row] = -1
            self.history[row, : len(tokens)] = tokens

        self.pending.append(run)

    def copy(self, group: int, source: Sequence[int], target: Sequence[int]) -> None:
        def run() -> None:
            self.cells[group][list(target)] = self.cells[group][list(source)]

        self.pending.append(run)

    def fill(self, group: int, ids: Sequence[int], value: float) -> None:
        def run() -> None:
            for id_ in ids:
                if group in self.cells:
                    self.cells[group][id_] = -1
                else:
                    self.states[group][id_] = None

        self.pending.append(run)

    def read(self, group: int, ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Everything launched so far is run first, as on a device."""
        while self.pending:
            self._run_next()
        self.num_units_read += len(ids)
        if group in self.cells:
            return {f"{group}.cells": self.cells[group][list(ids)]}
        states = [self.states[group][id_] or (-1, -1) for id_ in ids]
        return {f"{group}.states": np.array(states, np.int64)}

    def write(
        self, group: int, ids: Sequence[int], arrays: Mapping[str, np.ndarray], owner: int
    ) -> None:
        def run() -> None:
            if group in self.cells:
                self.cells[group][list(ids)] = arrays[f"{group}.cells"]
                return
            for id_, (value, length) in zip(ids, arrays[f"{group}.states"].tolist(), strict=True):
                self.states[group][id_] = (value, length)
                self.owners[group][id_] = owner

        self.num_units_written += len(ids)
        self.pending.append(run)

    def _read(self, step: _Pending, name: str) -> np.ndarray:
        while step.results is None:
            self._run_next()
        return step.results[name]

    def _run_next(self) -> None:
        first = self.pending[0]
        if isinstance(first, _Pending) and first.error is not None:
            self._lost = True  # and whatever waits for it fails as well
            raise first.error
        del self.pending[0]
        if isinstance(first, _Pending):
            self._run(first)
        else:
            first()

    def _complain(self, text: str) -> None:
        self.violations.append(text)

    def _run(self, step: _Pending) -> None:
        batch = step.batch
        size, rows = len(batch.seq_lens), int(batch.counts[1])
        self.shapes.add((batch.kind, len(batch.token_ids), size))
        for error in _layout_errors(batch, self.config):
            self._complain(f"batch layout: {error}")
        tokens = self._tokens(batch)
        self._write_pages(batch, tokens)
        verify = batch.kind is StepKind.VERIFY
        width = self.config.tokens_per_decode if verify else 1  # sampled tokens per row
        results = {
            "tokens": np.zeros(size * width, np.int32),
            "chosen": np.zeros(size * width, np.float32),
            "top_ids": np.zeros((size * width, self.config.max_logprobs), np.int32),
            "top": np.zeros((size * width, self.config.max_logprobs), np.float32),
            "finite": np.ones(size * width, bool),
            "usable": np.ones(size * width, bool),
            "owner_ok": np.ones(size, bool),
        }
        for i in range(rows):
            row, length = int(batch.row_ids[i]), int(batch.seq_lens[i])
            parts, results["owner_ok"][i], uid = self._read_row(batch, i, tokens[i], width)
            if row not in step.sampling:
                self._complain(f"row {row} has no sampling parameters")
                continue
            params, seed, _ = step.sampling[row]
            for k, seen in enumerate(parts):
                at, names = i * width + k, {uid, (uid, length - width + 1 + k)}
                token = _choose(seen, params, seed, self.model_config.vocab_size)
                if not verify:
                    self.last_token[row] = token
                results["tokens"][at] = token
                results["chosen"][at] = -0.5
                results["top_ids"][at] = (token + np.arange(self.config.max_logprobs)) % 97
                results["top"][at] = -0.5 - np.arange(self.config.max_logprobs)
                results["finite"][at] = not (
                    names & self.poisoned_uids or row in self.poisoned_rows
                )
                results["usable"][at] = not names & self.unusable_uids
        if batch.targets is not None:
            results |= self._prompt_logprobs(batch)
        step.results = results

    def _prompt_logprobs(self, batch: StepBatch) -> dict[str, np.ndarray]:
        """Of each token the place and the target are told, so that mixed up ones are seen."""
        targets = np.asarray(batch.targets)
        ids = targets[:, None] + np.arange(self.config.max_logprobs)
        return {
            "prompt_chosen": toy_prompt_logprob(np.asarray(batch.positions) + 1, targets),
            "prompt_top_ids": np.where(targets[:, None] < 0, -1, ids % 97).astype(np.int32),
            "prompt_top": np.zeros(ids.shape, np.float32),
        }

    def _tokens(self, batch: StepBatch) -> list[list[int]]:
        """Per row the tokens fed; -1 comes from the carry. Also writes the history."""
        result = []
        for i in range(int(batch.counts[1])):
            start, end = batch.query_start_loc[i : i + 2]
            fed = [int(t) for t in batch.token_ids[start:end]]
            row = int(batch.row_ids[i])
            if -1 in fed and i >= batch.counts[0]:
                self._complain("a prefill row takes a token from the carry")
            fed = [int(self.last_token[row]) if t == -1 else t for t in fed]
            first = int(batch.seq_lens[i]) - len(fed)
            expected = list(range(first, first + len(fed)))
            if batch.positions[start:end].tolist() != expected:
                self._complain("positions do not follow from seq_lens")
            self.history[row, first : first + len(fed)] = fed
            result.append(fed)
        return result

    def _write_pages(self, batch: StepBatch, tokens: list[list[int]]) -> None:
        page_size = self.sizes.page_size
        for g, cells in self.cells.items():
            table, writers = np.asarray(batch.tables[g]), {}
            for i, fed in enumerate(tokens):
                first = int(batch.seq_lens[i]) - len(fed)
                for position, token in enumerate(fed, first):
                    page = int(table[i, position // page_size % table.shape[1]])
                    if not 0 < page < len(cells) or writers.setdefault(page, i) != i:
                        self._complain(f"page {page} of group {g} is not this row's to write")
                    cells[page % len(cells), position % page_size] = (token, position)

    def _read_row(
        self, batch: StepBatch, i: int, fed: list[int], width: int
    ) -> tuple[list[list[int]], bool, int]:
        """Hash per group after each of the last `width` tokens, whether the state slot that was
        read was the row's own, and the owner's uid."""
        parts: list[list[int]] = [[] for _ in range(width)]
        owner_ok, uid = True, -1
        length, row = int(batch.seq_lens[i]), int(batch.row_ids[i])
        first = length - len(fed)
        for g, group in enumerate(self.groups):
            if g in self.cells:
                span = group.spec.window if isinstance(group.spec, WindowSpec) else length
                for end in range(first + 1, length + 1):  # every query sees its own window
                    start = max(0, end - span)
                    seen = self._read_pages(batch, g, i, start, end)
                    if seen != self.history[row, start:end].tolist():
                        self._complain(f"row {row}: pages of group {g} hold other tokens")
                    if end > length - width:
                        parts[end - length - 1].append(_absorb(0, seen))
                continue
            slots, state = batch.tables[g], self.states[g]
            assert isinstance(slots, StateSlots)
            read, uid = int(slots.read[i]), int(slots.write_owner[i])
            value = 0
            if first:
                owner_ok &= bool(self.owners[g][read] == slots.read_owner[i])
                if state[read] is None or state[read][1] != first:
                    self._complain(f"slot {read} of group {g} holds the state of another place")
                value, _ = state[read] or (0, 0)
            value = _absorb(value, fed[: len(fed) - width])
            written = np.atleast_1d(slots.write[i]).tolist()
            for k, (slot, token) in enumerate(zip(written, fed[-width:], strict=True)):
                value = _absorb(value, [token])
                state[slot] = (value, length - width + 1 + k)
                self.owners[g][slot] = uid if owner_ok else 0
                parts[k].append(value)
        return parts, owner_ok, uid

    def _read_pages(self, batch: StepBatch, g: int, i: int, start: int, end: int) -> list[int]:
        positions = np.arange(start, end)
        table, page_size = np.asarray(batch.tables[g])[i], self.sizes.page_size
        pages = table[positions // page_size % len(table)]
        cells = self.cells[g][pages, positions % page_size]
        if (pages == 0).any() or (cells[:, 1] != positions).any():
            self._complain(f"batch row {i} reads an unwritten place of group {g}")
        return cells[:, 0].tolist()


def _layout_errors(batch: StepBatch, config: EngineConfig) -> list[str]:
    """What of a batch is not laid out as the step expects."""
    decode, rows = (int(n) for n in batch.counts)
    starts, lens = batch.query_start_loc, batch.seq_lens
    size, total = len(lens), int(starts[rows])
    verify, width = batch.kind is StepKind.VERIFY, config.tokens_per_decode
    buckets = {
        StepKind.DECODE: (size,),
        StepKind.VERIFY: (size * width,),
        StepKind.MIXED: config.token_buckets,
    }
    checks = {
        "row bucket": size in config.row_buckets,
        "token bucket": len(batch.token_ids) in buckets[batch.kind],
        "tokens of guesses": not verify or all(np.diff(starts[: rows + 1]) == width),
        "T >= S": len(batch.token_ids) >= size,
        "decode kind": (batch.kind is StepKind.DECODE) == (decode == rows) or rows == 0,
        "decode rows": list(starts[: decode + 1]) == list(range(decode + 1)),
        "row lengths": all(np.diff(starts[: rows + 1]) >= 1),
        "padding starts": all(starts[rows:] == total),
        "padding lens": not lens[rows:].any(),
        "padding rows": not batch.row_ids[rows:].any(),
        "padding tokens": not batch.token_ids[total:].any(),
        "padding positions": not batch.positions[total:].any(),
        "distinct rows": len(set(batch.row_ids[:rows].tolist()) - {0}) == rows,
        "dtypes": all(
            np.asarray(a).dtype == np.int32
            for a in (batch.token_ids, batch.positions, starts, lens, batch.counts)
        ),
    }
    for i, table in enumerate(batch.tables):
        if isinstance(table, StateSlots):
            padding = (table.read, table.write, table.read_owner, table.write_owner)
            checks[f"padding slots {i}"] = not any(a[rows:].any() for a in padding)
            written = np.ravel(table.write[:rows]).tolist()
            slots = rows * (width if verify else 1)
            checks[f"distinct slots {i}"] = len(set(written) - {0}) == len(written) == slots
        else:
            checks[f"padding pages {i}"] = not table[rows:].any()
    return [name for name, good in checks.items() if not good]
