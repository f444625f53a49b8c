"""What goes into one step and what comes out of it.

The engine fills a `StepBatch` with numpy arrays of a bucket's shape; the compiled step reads it.
Dimension letters: T tokens, S rows, M page-table width, R persistent rows, L places of a
sequence, and N sampled tokens: one per row (N = S), in a VERIFY step one per token (N = T).
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import jax

from hybrid_jax.cache.arrays import LayerCache, StateSlots
from hybrid_jax.runtime.logprobs import Logprobs
from pallas_kernels.ragged import RaggedBatch


class StepKind(Enum):
    """The phase of a step.

    DECODE: one token per row, T == S. MIXED: any ragged batch. VERIFY: T / S tokens in every row,
    and the state after each of them in a slot of its own, so that some can be taken back; a token
    is sampled after each.
    """

    DECODE = "decode"
    MIXED = "mixed"
    VERIFY = "verify"


@dataclass(frozen=True)
class Returns:
    """What a step returns besides sampled tokens. Each value is a trace of its own."""

    logits: Literal["none", "last", "all"] = "none"  # of no token, those sampled from, or every one
    hidden: tuple[int, ...] = ()  # hidden states after so many layers; 0: the embeddings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenMasks:
    """Which tokens may be sampled. V is the size of the vocabulary."""

    constrained: jax.Array  # bool[N]; where false, any token
    allowed: jax.Array  # i32[N, ceil(V / 32)] bit v % 32 of word v // 32 is token v


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch:
    """One ragged batch, padded to a bucket: decode rows, then prefill chunks, then padding.

    `tables` has one entry per cache group, in the plan's order: `i32[S, M]` page tables for page
    groups (logical page i of a row in column i % M; page 0 is the null page), `StateSlots` for
    state groups.
    """

    token_ids: jax.Array  # i32[T]; -1: the row's last sampled token, from the carry
    positions: jax.Array  # i32[T]; 0 for padding
    query_start_loc: jax.Array  # i32[S + 1]
    seq_lens: jax.Array  # i32[S] after this step; 0 for padding rows
    row_ids: jax.Array  # i32[S] persistent row of each batch row; padding: 0, the null row
    counts: jax.Array  # i32[2] decode rows, all rows
    tables: tuple[jax.Array | StateSlots, ...]
    kind: StepKind = field(metadata={"static": True})
    returns: Returns = field(default=Returns(), metadata={"static": True})
    # None makes a trace of its own; `Runner.complete` says "nobody asks" with arrays instead.
    masks: TokenMasks | None = None  # None: any token
    targets: jax.Array | None = None  # i32[T] the prompt's next token after each, if its log
    # probability is asked for, else -1; None: for none. Steps with prompts only.

    @property
    def ragged(self) -> RaggedBatch:
        """The row boundaries, as the kernels take them."""
        return RaggedBatch(
            self.query_start_loc, self.seq_lens, self.counts, self.kind is StepKind.DECODE
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What the host reads after a step. Padding rows are meaningless and must be ignored; so is, of
    an unfinished prefill chunk, everything but `owner_ok`."""

    tokens: jax.Array  # i32[N] sampled
    logprobs: Logprobs  # of `tokens`, [N]; nothing when no row asked
    finite: jax.Array  # bool[N] the logits had no NaN or Inf
    usable: jax.Array  # bool[N] what its request asked for left a token to sample
    owner_ok: jax.Array  # bool[S] every state slot read belonged to the expected owner
    prompt_logprobs: Logprobs | None  # of the batch's `targets`, [T]; None: the batch had none
    # As `StepBatch.returns` asks:
    logits: jax.Array | None = None  # f32[S, V] or f32[T, V]
    hidden: tuple[jax.Array, ...] = ()  # [T, D] each, before the final norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """Everything on the device that outlives a step. Donated to the step and returned by it."""

    caches: tuple[LayerCache, ...]  # one per layer
    owners: tuple[jax.Array, ...]  # i32[slots] per state group, in the plan's order
    last_token: jax.Array  # i32[R] last sampled token of each persistent row
    history: jax.Array  # i32[R, L] token at each position of each persistent row
