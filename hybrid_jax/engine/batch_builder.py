"""From a schedule to a step batch: bucket, padded arrays, tables, and the check of every id."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hybrid_jax.cache.arrays import StateSlots
from hybrid_jax.engine.cache_manager import CacheManager
from hybrid_jax.engine.in_flight import prompt_spans
from hybrid_jax.engine.scheduler import Schedule
from hybrid_jax.engine.types import Sequence
from hybrid_jax.errors import IntegrityError
from hybrid_jax.runtime.batch import StepBatch, StepKind, TokenMasks

if TYPE_CHECKING:
    from hybrid_jax.config import EngineConfig

IntArray = npt.NDArray[np.int32]


def step_shapes(config: "EngineConfig") -> list[tuple[StepKind, int, int]]:
    """Every (kind, T, S) that `BatchBuilder` can produce. `config` is resolved."""
    kind, count = _decode_kind(config), config.tokens_per_decode
    shapes = [(kind, rows * count, rows) for rows in config.row_buckets]
    for tokens in config.token_buckets:
        shapes += [(StepKind.MIXED, tokens, rows) for rows in config.row_buckets if rows <= tokens]
    return shapes


def _decode_kind(config: "EngineConfig") -> StepKind:
    """Also rows without a guess verify, so that a request has one kind of step after its prompt."""
    return StepKind.VERIFY if config.num_speculative_tokens else StepKind.DECODE


def bucket(buckets: tuple[int, ...], need: int) -> int:
    """The first of the ascending `buckets` that holds `need`."""
    for size in buckets:
        if size >= need:
            return size
    raise IntegrityError(f"{need} does not fit the largest bucket of {buckets}")


class BatchBuilder:
    """Fills the arrays of a `StepBatch` from the counters and tables of scheduled sequences.

    Every array is made anew: JAX may alias numpy memory on CPU for as long as a step is in flight,
    and no host event says when that ends.
    """

    def __init__(self, cache: CacheManager, config: "EngineConfig", vocab_size: int) -> None:
        self._cache = cache
        self._config = config
        self._vocab_size = vocab_size
        self._num_groups = len(cache.page_groups) + len(cache.state_groups)

    def build(self, plan: Schedule) -> StepBatch:
        """The padded batch of `plan`, which must not be empty. Arrays are numpy arrays.

        Raises:
            IntegrityError: an id is null, out of range or written by two rows.
        """
        sequences = plan.sequences
        num_rows, num_decode = len(sequences), len(plan.decode)
        size = bucket(self._config.row_buckets, num_rows)
        if plan.prefill:
            kind = StepKind.MIXED
            width = bucket(self._config.token_buckets, max(plan.num_tokens, size))
        else:
            kind, width = _decode_kind(self._config), size * self._config.tokens_per_decode
        verify = kind is StepKind.VERIFY

        lens = [s.num_scheduled_tokens for s in sequences]
        starts = np.full(size + 1, plan.num_tokens, np.int32)
        starts[0] = 0
        np.cumsum(lens, out=starts[1 : num_rows + 1])
        seq_lens = np.zeros(size, np.int32)
        seq_lens[:num_rows] = [s.num_computed_tokens + s.num_scheduled_tokens for s in sequences]
        row_ids = np.zeros(size, np.int32)
        row_ids[:num_rows] = [s.row for s in sequences]
        token_ids, positions = self._tokens(sequences, num_decode, width)
        tables = self._tables(row_ids, verify=verify)
        self._check(sequences, seq_lens, token_ids, row_ids, tables)
        arrays: dict[str, Any] = {
            "token_ids": token_ids,
            "positions": positions,
            "query_start_loc": starts,
            "seq_lens": seq_lens,
            "row_ids": row_ids,
            # Rows of several tokens are prefill rows for every op.
            "counts": np.array((0 if verify else num_decode, num_rows), np.int32),
            "tables": tables,
        }
        masks = self._masks(sequences, size, width if verify else size)
        targets = self._targets(plan, width)
        return StepBatch(**arrays, kind=kind, masks=masks, targets=targets)

    def padding_batches(self) -> Iterator[StepBatch]:
        """One batch without rows per bucket: what a runner warms up with."""
        for kind, width, size in step_shapes(self._config):
            arrays: dict[str, Any] = {
                "token_ids": np.zeros(width, np.int32),
                "positions": np.zeros(width, np.int32),
                "query_start_loc": np.zeros(size + 1, np.int32),
                "seq_lens": np.zeros(size, np.int32),
                "row_ids": np.zeros(size, np.int32),
                "counts": np.zeros(2, np.int32),
                "tables": self._tables(np.zeros(size, np.int32), verify=kind is StepKind.VERIFY),
            }
            yield StepBatch(**arrays, kind=kind)

    def _tokens(
        self, sequences: list[Sequence], num_decode: int, width: int
    ) -> tuple[IntArray, IntArray]:
        """Token ids and positions, i32[T] each."""
        token_ids = np.zeros(width, np.int32)
        positions = np.zeros(width, np.int32)
        decode, count = sequences[:num_decode], self._config.tokens_per_decode
        newest = [-1 if s.num_inflight else s.token_ids[-1] for s in decode]
        # Missing guesses are filled up, so that all rows have equally many tokens.
        rows = np.repeat(np.array(newest, np.int32)[:, None], count, axis=1)
        for row, sequence in zip(rows, decode, strict=True):
            if sequence.draft_token_ids:
                row[1 : 1 + len(sequence.draft_token_ids)] = sequence.draft_token_ids
        starts = np.array([s.num_computed_tokens for s in decode], np.int32)[:, None]
        at = num_decode * count
        token_ids[:at] = rows.ravel()
        positions[:at] = (starts + np.arange(count, dtype=np.int32)).ravel()
        for sequence in sequences[num_decode:]:
            start, n = sequence.num_computed_tokens, sequence.num_scheduled_tokens
            token_ids[at : at + n] = sequence.token_ids[start : start + n]
            positions[at : at + n] = np.arange(start, start + n, dtype=np.int32)
            at += n
        return token_ids, positions

    @staticmethod
    def _targets(plan: Schedule, width: int) -> Any:
        """The prompt tokens whose log probabilities are asked for, i32[T]; None when none are."""
        spans = prompt_spans(plan)
        if not spans:
            return None
        targets = np.full(width, -1, np.int32)
        for span in spans:
            targets[span.start : span.start + len(span.targets)] = span.targets
        return targets

    def _tables(self, row_ids: IntArray, *, verify: bool) -> tuple[Any, ...]:
        """One table per cache group; padding rows gather the null row of every table."""
        owners = self._cache.row_owners[row_ids]
        read_owners = self._cache.read_owners[row_ids]
        tables: list[Any] = []
        for i in range(self._num_groups):
            if i in self._cache.page_groups:
                tables.append(self._cache.page_groups[i].table[row_ids])
            else:
                group = self._cache.state_groups[i]
                write = group.write[row_ids] if verify else group.write[row_ids, 0]
                slots: Any = (group.read[row_ids], write, read_owners, owners)
                tables.append(StateSlots(*slots))
        return tuple(tables)

    def _masks(self, sequences: list[Sequence], size: int, sampled: int) -> TokenMasks | None:
        """What the rows that sample in this step may sample; None when any of them anything.

        Of `sampled` tokens, `sampled / size` are a row's. Only the first of them counts in a row
        with a matcher, which has no guesses.
        """
        stride = sampled // size
        matchers = {
            row * stride: s.matcher
            for row, s in enumerate(sequences)
            if s.matcher is not None
            and s.num_computed_tokens + s.num_scheduled_tokens >= s.num_tokens
        }
        if not matchers:
            return None
        constrained: Any = np.zeros(sampled, np.bool_)
        allowed: Any = np.zeros((sampled, -(-self._vocab_size // 32)), np.int32)
        for row, matcher in matchers.items():
            constrained[row] = True
            allowed[row] = matcher.allowed
        return TokenMasks(constrained, allowed)

    def _check(
        self,
        sequences: list[Sequence],
        seq_lens: IntArray,
        token_ids: IntArray,
        row_ids: IntArray,
        tables: tuple[Any, ...],
    ) -> None:
        """Refuses ids that XLA would clip or that two rows would write. Costs microseconds."""
        num_rows = len(sequences)
        if token_ids.min() < -1 or token_ids.max() >= self._vocab_size:
            raise IntegrityError(f"a token id is outside [0, {self._vocab_size})")
        if int(seq_lens.max()) > self._config.max_positions:
            raise IntegrityError(f"a row is longer than {self._config.max_positions} tokens")
        self._check_distinct(row_ids[:num_rows].tolist(), self._cache.rows.size, "row")
        page_size = self._cache.page_size
        for i, table in enumerate(tables):
            if isinstance(table, StateSlots):
                self._check_slots(i, table, num_rows)
                continue
            group = self._cache.page_groups[i]
            written: list[int] = []
            for row, sequence in enumerate(sequences):
                end = sequence.num_computed_tokens + sequence.num_scheduled_tokens
                start = sequence.num_computed_tokens
                run = table[row]
                for logical in range(start // page_size, (end - 1) // page_size + 1):
                    written.append(int(run[logical % group.width]))
                first = group.first_live_page(start)
                last = (end - 1) // page_size
                if np.count_nonzero(run) < last - first + 1:
                    raise IntegrityError(f"sequence {sequence.uid} lacks a page in group {i}")
            self._check_distinct(written, group.pool.size, "written page")
            if any(group.pool.is_read_only(page) for page in written):
                raise IntegrityError(f"a page of group {i} is written but others may read it")

    def _check_slots(self, i: int, table: StateSlots, num_rows: int) -> None:
        pool = self._cache.state_groups[i].pool
        read = np.asarray(table.read)[:num_rows].tolist()
        writes = np.asarray(table.write)[:num_rows].reshape(num_rows, -1).tolist()
        writer = {slot: row for row, slots in enumerate(writes) for slot in slots}
        self._check_distinct([slot for slots in writes for slot in slots], pool.size, "slot")
        if min(read) < 1 or max(read) >= pool.size:
            raise IntegrityError(f"a read slot of group {i} is outside [1, {pool.size})")
        if any(writer.get(slot, row) != row for row, slot in enumerate(read)):
            raise IntegrityError(f"a slot of group {i} is read and written by different rows")
        if any(pool.is_read_only(slot) for slot in writer):
            raise IntegrityError(f"a slot of group {i} is written but others may read it")

    @staticmethod
    def _check_distinct(ids: list[int], size: int, what: str) -> None:
        if len(set(ids)) != len(ids):
            raise IntegrityError(f"a {what} is used by two batch rows")
        if min(ids) < 1 or max(ids) >= size:
            raise IntegrityError(f"a {what} is outside [1, {size})")
