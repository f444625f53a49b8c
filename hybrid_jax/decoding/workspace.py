"""A model on the device with room for sessions, and the compiled step that they all share."""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from hybrid_jax.cache.arrays import StateSlots
from hybrid_jax.cache.plan import pages_for, table_width
from hybrid_jax.cache.snapshot import Snapshot
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.decoding.memory import Mark, Memory, MemoryPools, Writes
from hybrid_jax.decoding.session import Session
from hybrid_jax.errors import InvalidRequest, StateOwnerMismatch
from hybrid_jax.fields import shown
from hybrid_jax.loading import LoadedModel
from hybrid_jax.runtime.batch import Returns, StepBatch, StepKind, StepOutput
from hybrid_jax.runtime.runner import Runner

LAST, ALL = Returns(logits="last"), Returns(logits="all")


class Workspace:
    """Runs the sessions of one model. Not thread-safe.

    It is the research counterpart of the engine: the same runner, compiled step and caches, without
    queue and scheduler. The caller says what runs in which step. A step compiles once per bucket
    (tokens, rows) and per kind of result.
    """

    def __init__(self, model: LoadedModel, **engine_options: Any) -> None:
        """Makes the caches.

        Args:
            model: from `hybrid_jax.load_model`.
            **engine_options: fields of `EngineConfig`. `max_num_seqs` is the most sessions in one
                step and, with `max_model_len`, decides the number of pages; `num_checkpoints` are
                the state slots besides one per session: for checkpoints, forks and drafts.

        Raises:
            ValueError: an option is unknown, or out of range for this model.
        """
        self.model = model
        self.runner = Runner(model, EngineConfig.of(engine_options))
        self.memory = MemoryPools(self.runner.plan.caches)
        self._uids = itertools.count(1)

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration."""
        return self.runner.config

    @property
    def model_config(self) -> ModelConfig:
        """The model."""
        return self.model.config

    @property
    def num_compiles(self) -> int:
        """Steps traced so far."""
        return self.runner.num_compiles

    def session(self) -> Session:
        """An empty session."""
        return self._open(Memory(next(self._uids)), [])

    def fork(self, session: Session) -> Session:
        """See `Session.fork`."""
        return self._open(
            self.memory.fork(session.memory, next(self._uids)), list(session.token_ids)
        )

    def restore(self, snapshot: Snapshot) -> Session:
        """A session that goes on from a snapshot, of this class or of `LLM.session`.

        It has the tokens that were computed; those of `snapshot.token_ids` after them are yours to
        feed. Its `next_logits` are known after the next token.

        Raises:
            SnapshotError: the snapshot is of another model, dtype or page size, or damaged.
            CachesFull: it does not fit.
        """
        counts = dict(enumerate(snapshot.check(self.runner, self.memory.page_size)))
        memory = Memory(next(self._uids), snapshot.length)
        self.memory.require(counts)
        ids = {g: [self.memory.pools[g].alloc() for _ in range(n)] for g, n in counts.items()}
        last = pages_for(snapshot.length, self.memory.page_size)
        for group in self.memory.paged:
            first = last - len(ids[group])
            memory.pages[group] = dict(zip(range(first, last), ids[group], strict=True))
        slots = {group: ids[group][0] for group in self.memory.states}
        memory.marks[snapshot.length] = Mark(slots, memory.uid)
        try:
            for group, some in ids.items():
                self.runner.write(group, some, snapshot.arrays, memory.uid)
        except Exception:
            self.memory.release(memory)  # nobody else knows of it
            raise
        return self._open(memory, list(snapshot.token_ids[: snapshot.length]))

    def decode(self, sessions: Sequence[Session], token_ids: Sequence[int]) -> np.ndarray:
        """One token for every session, in one step.

        Returns:
            f32[sessions, V]: the logits of their next tokens.
        """
        rows = [[token] for token in token_ids]
        output = self.run(sessions, rows, StepKind.DECODE, LAST)
        return np.asarray(output.logits)[: len(sessions)]

    def verify(self, sessions: Sequence[Session], token_ids: Sequence[Sequence[int]]) -> np.ndarray:
        """Equally many tokens for every session, in one step, each of which can be taken back.

        The state after every token stays in a slot of its own until the session's next step, so
        `rewind` can go back to any of them. The arithmetic of linear layers is that of decoding.

        Returns:
            f32[sessions, tokens, V]: the logits after each token.
        """
        output = self.run(sessions, token_ids, StepKind.VERIFY, ALL)
        logits = np.asarray(output.logits)
        return logits.reshape(-1, len(token_ids[0]), logits.shape[-1])[: len(sessions)]

    def run(
        self,
        sessions: Sequence[Session],
        rows: Sequence[Sequence[int]],
        kind: StepKind,
        returns: Returns,
    ) -> StepOutput:
        """Feeds every session its tokens, equally many, in one compiled step.

        Raises:
            InvalidRequest: there is nothing to do, a token is none, or there are more tokens, rows
                or positions than the configuration allows.
            CachesFull: there is no room. Nothing was computed.
            StateOwnerMismatch: a slot held another session's state: a bug of this library.
        """
        self._check(sessions, rows)
        memories, count = [session.memory for session in sessions], len(rows[0])
        verify = kind is StepKind.VERIFY
        writes, copies = self.memory.reserve(memories, count, verify=verify)
        for group, pages in copies.items():
            self.runner.copy(group, list(pages.values()), list(pages))
        batch = self._batch(memories, rows, writes, kind, returns)
        output = self.runner.step(batch, self.runner.sampling_rows.device())
        assert output.logits is not None
        for i, (session, tokens) in enumerate(zip(sessions, rows, strict=True)):
            first = i
            if returns.logits == "all":
                first = i * count + (0 if verify else count - 1)
            self.memory.commit(
                session.memory, count, writes[i], verify=verify, logits=output.logits, first=first
            )
            session.token_ids += tokens
        if not np.asarray(output.owner_ok)[: len(rows)].all():
            raise StateOwnerMismatch("a state slot held another session's state")
        return output

    def _open(self, memory: Memory, token_ids: list[int]) -> Session:
        session = Session(self, memory, token_ids)
        session.close = weakref.finalize(session, self.memory.release, memory)
        return session

    def _check(self, sessions: Sequence[Session], rows: Sequence[Sequence[int]]) -> None:
        config, vocab = self.config, self.model_config.vocab_size
        if not sessions or len(sessions) != len(rows) or len({id(s) for s in sessions}) < len(rows):
            raise InvalidRequest(
                f"{len(sessions)} sessions got {len(rows)} lists of tokens; give every session, "
                "each once, a list of its own"
            )
        if len(sessions) > config.max_num_seqs:
            raise InvalidRequest(
                f"{len(sessions)} sessions are more than max_num_seqs {config.max_num_seqs}; "
                "decode them in parts or raise it"
            )
        count = len(rows[0])
        if not count or any(len(row) != count for row in rows):
            raise InvalidRequest(
                f"the sessions of a step take equally many tokens, at least one; got "
                f"{[len(row) for row in rows]}"
            )
        for session, row in zip(sessions, rows, strict=True):
            if not session.close.alive:
                raise InvalidRequest("the session is closed; fork or open another one")
            for token in row:
                if not isinstance(token, (int, np.integer)) or isinstance(token, bool):
                    raise InvalidRequest(
                        f"{shown(token)} is no token id; encode text with the model's tokenizer"
                    )
                if not 0 <= token < vocab:
                    raise InvalidRequest(
                        f"token id {shown(token)} is outside the vocabulary of {vocab}; encode "
                        "text with this model's tokenizer"
                    )
            if session.memory.length + count > config.max_model_len:
                raise InvalidRequest(
                    f"{session.memory.length} tokens and {count} more are longer than "
                    f"max_model_len {config.max_model_len}; raise it"
                )
        if count * len(rows) > config.max_num_batched_tokens:
            raise InvalidRequest(
                f"{count * len(rows)} tokens are more than a step takes; raise "
                f"max_num_batched_tokens {config.max_num_batched_tokens} or feed fewer"
            )

    def _batch(
        self,
        memories: list[Memory],
        rows: Sequence[Sequence[int]],
        writes: list[Writes],
        kind: StepKind,
        returns: Returns,
    ) -> StepBatch:
        """The smallest bucket that holds the rows, padded, as numpy arrays."""
        config, num_rows, count = self.config, len(rows), len(rows[0])
        size = next(n for n in config.row_buckets if n >= num_rows)
        if kind is StepKind.MIXED:
            width = next(n for n in config.token_buckets if n >= max(num_rows * count, size))
        else:
            width = size * count
        tokens, positions = np.zeros(width, np.int32), np.zeros(width, np.int32)
        tokens[: num_rows * count] = np.concatenate([np.asarray(row, np.int32) for row in rows])
        before = np.array([memory.length for memory in memories], np.int32)
        positions[: num_rows * count] = (before[:, None] + np.arange(count)).ravel()
        decode = num_rows if kind is StepKind.DECODE else 0
        arrays: dict[str, Any] = {
            "token_ids": tokens,
            "positions": positions,
            "query_start_loc": np.minimum(np.arange(size + 1), num_rows).astype(np.int32) * count,
            "seq_lens": _padded(before + count, size),
            "row_ids": _padded(np.arange(1, num_rows + 1), size),
            "counts": np.array((decode, num_rows), np.int32),
            "tables": tuple(
                self._pages(group, memories, size)
                if group in self.memory.paged
                else _slots(group, memories, writes, size, kind)
                for group in range(len(self.runner.groups))
            ),
        }
        return StepBatch(**arrays, kind=kind, returns=returns)

    def _pages(self, group: int, memories: list[Memory], size: int) -> np.ndarray:
        """i32[S, M]: logical page i of a row in column i % M."""
        width = table_width(self.memory.paged[group], self.config)
        table = np.zeros((size, width), np.int32)
        for row, memory in enumerate(memories):
            for logical, id_ in self.memory.live_pages(memory, group, memory.length).items():
                table[row, logical % width] = id_
        return table


def _slots(
    group: int, memories: list[Memory], writes: list[Writes], size: int, kind: StepKind
) -> StateSlots:
    """Every row reads its current state and writes one slot, or one per token."""
    current = [memory.marks.get(memory.length) for memory in memories]
    write = np.array([write.slots[group] for write in writes])
    table: dict[str, Any] = {
        # A session without tokens starts from zeros; it reads nothing.
        "read": _padded([mark.slots[group] if mark else 0 for mark in current], size),
        "write": _padded(write if kind is StepKind.VERIFY else write[:, 0], size),
        "read_owner": _padded([mark.owner if mark else 0 for mark in current], size),
        "write_owner": _padded([memory.uid for memory in memories], size),
    }
    return StateSlots(**table)


def _padded(values: Any, size: int) -> np.ndarray:
    """i32[size, ...]: zeros, the null ids, after the values."""
    values = np.asarray(values, np.int32)
    return np.pad(values, [(0, size - len(values))] + [(0, 0)] * (values.ndim - 1))
