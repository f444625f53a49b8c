"""What the parts of the engine hand to each other: requests, sequences, events, the runner."""

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from hybrid_jax.cache.prefix import CacheReport, Node, Prefix
from hybrid_jax.engine.step_clock import Phase
from hybrid_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hybrid_jax.cache.arrays import CacheSizes
    from hybrid_jax.config import EngineConfig, ModelConfig
    from hybrid_jax.memory.snapshot import LiveBytes
    from hybrid_jax.runtime.batch import StepBatch, StepOutput
    from hybrid_jax.runtime.sampling import SamplingTable
    from hybrid_jax.specs import CacheGroup
    from hybrid_jax.structured import TokenMatcher

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_UID = 2**31 - 1


def _no_tokens() -> np.ndarray:
    return np.zeros(0, np.int32)


class SequenceState(Enum):
    """Where a sequence is in its life. Only RUNNING sequences hold pages, slots and a row."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class ReleaseReason(Enum):
    """Why a sequence gives back what it holds."""

    FINISH = "finish"
    ABORT = "abort"
    PREEMPT = "preempt"
    FAILURE = "failure"


@dataclass(frozen=True)
class Request:
    """What a client sent. Immutable."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None = None
    prefix: Prefix | None = None  # a kept beginning of the prompt, given away with the request
    keep: bool = False  # whether the final event brings what was computed as a kept prefix


@dataclass(slots=True)
class PageRun:
    """Consecutive logical pages of one sequence in one page group.

    Logical page `first + i` is page `ids[i]`. Full-attention groups have `first` 0 for ever;
    window groups drop pages on the left as the window moves.
    """

    first: int = 0
    ids: deque[int] = field(default_factory=deque)

    def __getitem__(self, logical: int) -> int:
        """The page of a logical page that was allocated; 0 if it was dropped."""
        return self.ids[logical - self.first] if logical >= self.first else 0


@dataclass(slots=True)
class StateRows:
    """The slot that the next step reads and those that it writes, in one state group.

    A step that verifies K guesses writes K + 1 slots, the state after each of its tokens; others
    write the first one only. `read` is one of them, unless others may read it as well.
    """

    read: int
    write: list[int]


@dataclass(frozen=True)
class Checkpoint:
    """A state that a launched step wrote and that is cached once the step is known to be good."""

    length: int  # tokens the state has seen
    slots: tuple[int, ...]  # per cache group; 0 for page groups


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's mutable state of one completion of a request.

    The counters are the only truth; what follows from them is a property. Tokens are counted from
    the first token of the prompt:

        |<--- num_committed_tokens --->|   whose step has been read and is known to be good
        |<------------- num_computed_tokens ------------>|
        |<--- prompt --->|<------- known outputs ------->|<-- num_inflight -->|
        |<------------------ token_ids ----------------->|   sampled by a launched step, unread
        |<------------------------------ num_tokens ------------------------->|

    `num_prefill_tokens` is what was known at admission: up to there tokens are prefilled, also
    after a preemption, and from there on the sequence decodes.
    """

    request: Request
    index: int  # completion number, 0 <= index < request.params.num_sequences
    arrival: int  # total order of all sequences; smaller is older
    uid: int  # owner mark of state slots: 0 < uid <= MAX_UID
    seed: int
    max_tokens: int  # params.max_tokens, clamped to max_model_len
    token_ids: list[int]
    matcher: "TokenMatcher | None" = None  # knows all of token_ids; None: not constrained
    state: SequenceState = SequenceState.WAITING

    num_committed_tokens: int = 0
    num_computed_tokens: int = 0  # in the caches, once all launched steps are done
    num_scheduled_tokens: int = 0  # of the step being built, guesses included
    num_inflight: int = 0  # 0 or 1 whenever the scheduler looks; 2 while two steps are launched
    num_prefill_tokens: int = 0
    num_preemptions: int = 0
    was_admitted: bool = False  # ever
    token_array: np.ndarray = field(default_factory=_no_tokens)  # i32; all of `token_ids` when
    # guesses were made last
    draft_token_ids: list[int] = field(default_factory=list)  # guesses of the step being built
    num_draft_tokens: int = 0  # guesses verified so far
    num_accepted_tokens: int = 0  # those of them that were right and became output
    cumulative_logprob: float = 0.0  # of the known output tokens, if they have log probabilities
    num_preempted_tokens: int = 0  # that were computed when it was preempted last

    row: int = 0  # persistent row; 0: holds nothing
    num_pages: int = 0  # logical pages reached so far, the same in every page group
    pages: tuple[PageRun | None, ...] = ()  # per cache group; None for state groups
    slots: tuple[StateRows | None, ...] = ()  # per cache group; None for page groups

    prefix: Prefix | None = None  # what an admission would start from; not pinned yet
    stops: tuple[int, ...] = ()  # positions where a prefill chunk must end
    is_good: bool = True  # no step since its admission came out wrong
    may_share: bool = False  # some of what it would write to has other users or is cached
    node: Node | None = None  # how far its tokens are in the prefix tree
    checkpoints: deque[Checkpoint] = field(default_factory=deque)  # not committed yet
    decode_checkpoint: Node | None = None  # the last one made while decoding
    report: CacheReport | None = None  # of its first admission
    # One entry per prompt token known so far, shared by a request's completions; None: not asked.
    prompt_logprobs: "list[TokenLogprob | None] | None" = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether it computes log probabilities of its prompt, which cached tokens have none of."""
        known = self.prompt_logprobs
        return self.index == 0 and known is not None and len(known) < self.num_prompt_tokens

    @property
    def began_restored(self) -> bool:
        """Whether it goes on from a snapshot: then what it computes is not for other requests."""
        return self.request.prefix is not None and self.request.prefix.restored

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens, in-flight ones not included."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """All tokens, in-flight ones included."""
        return len(self.token_ids) + self.num_inflight

    @property
    def is_decoding(self) -> bool:
        """Whether the next token to compute is the newest sampled one. A phase, not a length."""
        return self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def is_exhausted(self) -> bool:
        """Whether the last token that may be generated is sampled or on its way."""
        prompt = len(self.request.prompt_token_ids)
        return len(self.token_ids) + self.num_inflight >= prompt + self.max_tokens

    @property
    def num_remaining_prefill(self) -> int:
        """Tokens still to be prefilled before the sequence decodes."""
        return max(0, self.num_prefill_tokens - self.num_computed_tokens)


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of one token, and of the most likely ones in its place."""

    token_id: int
    logprob: float
    top: dict[int, float]  # token id -> log probability, most likely first


@dataclass(frozen=True)
class Usage:
    """What a request consumed, all its completions together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens that were not computed because a cache had them
    draft_tokens: int = 0  # guesses at output tokens that were verified
    accepted_tokens: int = 0  # those of them that were right and became output


@dataclass(frozen=True)
class TokenEvent:
    """News of one completion of a request.

    Each completion has exactly one event with a `finish_reason`, its last. The last of these of a
    request, its final event, carries the `usage`.
    """

    request_id: str
    index: int
    new_token_ids: tuple[int, ...]
    text: str  # what became certain since the last event; "" without a tokenizer
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per new token, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that was found
    usage: Usage | None = None
    error: Exception | None = None  # set when finish_reason is "error"
    kept: Prefix | None = None  # on the final event, if the request asked for it and finished
    cache: CacheReport | None = None  # on a completion's last event, if its prompt was computed
    # On the request's first event with a token, if asked for: one per prompt token, None for the
    # first.
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    cumulative_logprob: float | None = None  # on a completion's last event, if it is to be ranked

    @property
    def final(self) -> bool:
        """Whether this is the request's last event."""
        return self.usage is not None


@dataclass(frozen=True)
class GroupStats:
    """Use of one pool: pages, slots or rows. The null id is not counted."""

    name: str
    total: int
    used: int
    cached: int  # used by nobody but kept for reuse; evicted when nothing else is free
    peak: int  # most ever used at once
    fragmentation: float = 0.0  # share of the token places in used pages that hold no token

    @property
    def free(self) -> int:
        """Ids that hold nothing anybody wants."""
        return self.total - self.used - self.cached


@dataclass(frozen=True)
class SwapStats:
    """Use of the host memory for preempted sequences."""

    total_bytes: int
    used_bytes: int
    peak_bytes: int  # most ever used at once
    num_out: int  # sequences saved so far
    num_in: int  # those of them that went on from there


@dataclass(frozen=True)
class SpeculationStats:
    """How well guesses went so far, of all sequences."""

    num_verified: int  # steps of a sequence; one token each came on top of those accepted, unless
    # an accepted one was the sequence's last
    draft_tokens: int  # guesses verified
    accepted_tokens: int  # those of them that were right and became output


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine's counters."""

    running: int
    waiting: int
    steps: int
    preemptions: int
    compiles: int
    phase_seconds: Mapping[Phase, float]  # of all steps so far; see `StepClock`
    prompt_tokens: int  # of admitted prompts
    cached_tokens: int  # those of them that were not computed because the caches had them
    recomputed_tokens: int  # that were computed, and lost in a preemption
    swap: SwapStats
    speculation: SpeculationStats
    caches: tuple[GroupStats, ...]


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def decode(self, token_ids: SequenceOf[int], *, skip_special_tokens: bool) -> str:
        """The text of `token_ids`; incomplete characters become U+FFFD."""
        ...


class RowSampling(Protocol):
    """The sampling parameters on the host, one entry per persistent row."""

    @property
    def processors(self) -> tuple[str, ...]:
        """Names of the logits processors that were compiled into the step."""
        ...

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        prompt_len: int,
        *,
        stop_ids: Iterable[int] = (),
    ) -> None:
        """Gives `row` to a sequence; `stop_ids` are barred until `params.min_tokens` are out."""
        ...

    def clear_row(self, row: int) -> None:
        """Makes `row` greedy and cheap again."""
        ...

    def device(self) -> "SamplingTable":
        """The table on the device, uploaded if something changed."""
        ...


class StepRunner(Protocol):
    """What the engine needs of a runner: the compiled step and what it was compiled for."""

    @property
    def config(self) -> "EngineConfig":
        """The resolved configuration."""
        ...

    @property
    def model_config(self) -> "ModelConfig":
        """The model that runs."""
        ...

    @property
    def groups(self) -> "tuple[CacheGroup, ...]":
        """Cache groups, in the order of `StepBatch.tables`."""
        ...

    @property
    def sizes(self) -> "CacheSizes":
        """Pages or slots per cache group."""
        ...

    @property
    def sampling_rows(self) -> RowSampling:
        """Where the engine puts the sampling parameters of running sequences."""
        ...

    @property
    def num_compiles(self) -> int:
        """Steps compiled so far."""
        ...

    def live_bytes(self) -> "LiveBytes":
        """What the device holds of this runner."""
        ...

    def step(self, batch: "StepBatch", sampling: "SamplingTable") -> "StepOutput":
        """Launches one step and returns without waiting for its results."""
        ...

    def prepare(self, batches: "Iterable[StepBatch]") -> None:
        """Called once, with padding for every bucket: compiles or checks what config says.

        Raises:
            ValueError: an implementation that `config.implementations` names cannot run.
        """
        ...

    def set_history(self, row: int, token_ids: SequenceOf[int]) -> None:
        """Tells `row` its first tokens, which no step will feed because they are computed."""
        ...

    def copy(self, group: int, source: SequenceOf[int], target: SequenceOf[int]) -> None:
        """Copies pages or slots of one cache group, before the next step."""
        ...

    def fill(self, group: int, ids: SequenceOf[int], value: float) -> None:
        """Overwrites pages or slots of one cache group, before the next step."""
        ...

    @property
    def fingerprint(self) -> str:
        """Names the parameters and everything else that decides what caches hold."""
        ...

    def read(self, group: int, ids: SequenceOf[int]) -> "dict[str, np.ndarray]":
        """What pages or slots of one cache group hold: "<layer>.<name>" -> [ids, ...]."""
        ...

    def write(
        self, group: int, ids: SequenceOf[int], arrays: "Mapping[str, np.ndarray]", owner: int
    ) -> None:
        """Undoes `read`, before the next step; slots belong to `owner` from then on."""
        ...

    def reset(self) -> None:
        """Makes fresh caches after a step that failed, whatever happened to the old ones."""
        ...
