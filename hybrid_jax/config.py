"""The two configurations: what the model is, and how the engine runs it."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from os import PathLike
from typing import Any, Literal

from hybrid_jax.fields import (
    INT32_MAX,
    Check,
    boolean,
    choice,
    integer,
    normalise,
    number,
    shown,
    tuple_of,
)
from hybrid_jax.specs import AttentionSpec, LayerSpec, NormSpec
from pallas_kernels.recurrence import CHUNK as LINEAR_CHUNK

MOST_BATCHED_TOKENS = 1_048_576  # in one step


@dataclass(frozen=True)
class ModelConfig:
    """A hybrid decoder: a tuple of layer specs and the sizes that all layers share.

    Built by `config_from_hf` of a family (`hybrid_jax/models/<model_type>.py`).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    max_position: int
    tie_word_embeddings: bool = False
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def layer_counts(self) -> dict[str, int]:
        """Number of layers per kind: full, window, linear."""
        return dict(Counter(layer.kind for layer in self.layers))

    @property
    def widest_window(self) -> int:
        """Tokens that the widest sliding window sees; 0 without one."""
        mixers = [layer.mixer for layer in self.layers]
        return max((m.window or 0 for m in mixers if isinstance(m, AttentionSpec)), default=0)


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs a model. `resolve` fills what depends on model and device.

    Zero or None means "choose for me" where noted.
    """

    max_num_seqs: int = 0  # sequences that run at once; 0: 16, or as many as fit
    max_model_len: int = 0  # tokens, prompt and output together; 0: the model's, at most 8,192, or
    # as many as fit
    max_num_batched_tokens: int = 1024  # token budget of a step
    page_size: int = 16
    num_pages: int = 0  # pages per full-attention group; 0: enough for max_num_seqs full sequences,
    # within cache_bytes
    cache_bytes: int = 0  # upper bound for caches on each device; 0: what is free of its share
    memory_utilization: float = 0.9  # the share of a device's memory to use
    max_queue: int = 0  # waiting requests; 0: no bound
    prefix_cache: bool = True  # keep what is computed, for prompts that begin with the same tokens
    checkpoint_interval: int = 0  # tokens between the states kept of a prompt; 0: 256 or a bit more
    num_checkpoints: int = 0  # state rows kept for reuse; 0: twice max_num_seqs
    swap_bytes: int = 0  # host memory for preempted sequences; 0: they are computed again
    # Guesses per sequence and step, made by prompt lookup (n-grams) and verified; 0: none.
    num_speculative_tokens: int = 0
    prefill_alignment: int = 0  # prefill chunks end at multiples; 0: the linear kernels' chunk or 1
    # Fill freed memory with NaN (int8, which has none: with 0) and check every id after every step.
    debug_poison: bool = False
    # Of keys and values; auto: the activation dtype, fp8: float8_e4m3fn. fp8 and int8 are scaled to
    # the ranges of K and V, which int8 needs and fp8 can do without.
    kv_dtype: Literal["auto", "float32", "bfloat16", "fp8", "int8"] = "auto"
    kv_ranges: str = ""  # file of `calibrate_kv`; empty: what the checkpoint's scales say, if any
    state_dtype: Literal["float32", "bfloat16"] = "float32"  # of stored recurrent states
    row_buckets: tuple[int, ...] = ()  # S; empty: powers of two up to max_num_seqs
    token_buckets: tuple[int, ...] = ()  # T of mixed steps; empty: powers of two up to the budget
    enforce_eager: bool = False
    run_ahead: bool = True  # launch step n + 1 before reading the tokens of step n
    warmup: bool = False  # compile every bucket before the first request
    compilation_cache: bool = True  # keep compiled steps across starts
    tensor_parallel_size: int = 1
    max_logprobs: int = 20
    max_logit_bias: int = 300
    seed: int = 0
    # op -> implementation that must run it, e.g. {"paged_attention": "reference"}; others: chosen
    implementations: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Normalises every field or raises ValueError with its name, its value and the remedy."""
        normalise(self, _CHECKS)
        if self.kv_ranges and self.kv_dtype not in ("fp8", "int8"):
            raise ValueError(
                f"kv_ranges {shown(self.kv_ranges)} are for kv_dtype fp8 or int8, not for "
                f"{self.kv_dtype}; change the one or leave out the other"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "EngineConfig":
        """A config from options by name, such as a user's keyword arguments.

        Raises:
            ValueError: a name is unknown or a value out of range.
        """
        for name in options:
            if name not in _CHECKS:
                close = ", ".join(get_close_matches(name, _CHECKS) or _CHECKS)
                raise ValueError(f"there is no engine option {name!r}; did you mean {close}?")
        return cls(**options)

    def resolve(self, model: ModelConfig) -> "EngineConfig":
        """A copy with limits and buckets filled in for `model`.

        Raises ValueError when a given value contradicts the model or another value.
        """
        if self.max_model_len > model.max_position:
            raise ValueError(
                f"max_model_len {self.max_model_len} is more than the model's positions; use at "
                f"most {model.max_position}"
            )
        max_len = self.max_model_len or min(model.max_position, 8192)
        seqs = self.max_num_seqs or 16
        rows = self.row_buckets or _doubling(1, seqs)
        budget = max(self.max_num_batched_tokens, rows[-1] * self.tokens_per_decode)
        tokens = self.token_buckets or _doubling(min(32, budget), budget)
        if list(rows) != sorted(set(rows)) or rows[-1] < seqs:
            raise ValueError(
                f"row_buckets must ascend and end at max_num_seqs {seqs} or more, got "
                f"{shown(rows)}; correct them or leave them out"
            )
        if list(tokens) != sorted(set(tokens)) or tokens[-1] < budget:
            raise ValueError(
                f"token_buckets must ascend and end at the token budget {budget} or more, got "
                f"{shown(tokens)}; correct them or leave them out"
            )
        linear = "linear" in model.layer_counts
        alignment = self.prefill_alignment or (LINEAR_CHUNK if linear else 1)
        granularity = math.lcm(alignment, self.page_size)
        interval = self.checkpoint_interval or -(-256 // granularity) * granularity
        if linear and interval % granularity:
            raise ValueError(
                f"checkpoint_interval {interval} must be a multiple of {granularity}, which holds "
                f"whole pages of {self.page_size} tokens and prefill chunks of {alignment}"
            )
        return replace(
            self,
            max_num_seqs=seqs,
            max_model_len=max_len,
            row_buckets=rows,
            token_buckets=tokens,
            max_num_batched_tokens=budget,
            # What to guess follows from the tokens of the step before.
            run_ahead=self.run_ahead and not self.num_speculative_tokens,
            prefill_alignment=alignment,
            checkpoint_interval=interval,
            num_checkpoints=(self.num_checkpoints or 2 * seqs if self.prefix_cache else 0),
        )

    @property
    def tokens_per_decode(self) -> int:
        """Tokens that a decoding sequence feeds in a step: the newest one and the guesses."""
        return 1 + self.num_speculative_tokens

    @property
    def max_positions(self) -> int:
        """Places for the tokens of a sequence: also guesses beyond its end are fed somewhere."""
        return self.max_model_len + self.num_speculative_tokens

    @property
    def hit_granularity(self) -> int:
        """Tokens that the length of a prefix hit is a multiple of. The config is resolved."""
        return math.lcm(self.prefill_alignment, self.page_size)


def _implementations(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(
        isinstance(word, str) for pair in value.items() for word in pair
    ):
        raise ValueError(
            f"{name} must map ops to implementations, got {shown(value)}; use for example "
            '{"paged_attention": "reference"}'
        )
    return dict(value)


def _file(name: str, value: Any) -> str:
    if not isinstance(value, str | PathLike):
        raise ValueError(f"{name} must be a path, got {shown(value)}; use a file of calibrate_kv")
    return str(value)


def _doubling(first: int, last: int) -> tuple[int, ...]:
    values = []
    while first < last:
        values.append(first)
        first *= 2
    return (*values, last)


_CHOSEN = "use 0 to have it chosen"
_buckets = tuple_of(integer(1, 1_048_576, "list sizes from small to large"), most=1024)
_CHECKS: dict[str, Check] = {
    "max_num_seqs": integer(1, 65_536, _CHOSEN, or_zero=True),
    # One token of a prompt and one of the output is the least a request can have.
    "max_model_len": integer(2, INT32_MAX, _CHOSEN, or_zero=True),
    "max_num_batched_tokens": integer(1, MOST_BATCHED_TOKENS, "the default is 1024"),
    "page_size": integer(1, 65_536, "the default is 16"),
    "num_pages": integer(2, INT32_MAX, _CHOSEN, or_zero=True),  # page 0 is the null page
    "cache_bytes": integer(1, 2**63 - 1, _CHOSEN, or_zero=True),
    "memory_utilization": number(0.0, 1.0, "the default is 0.9", above=True),
    "max_queue": integer(0, INT32_MAX, "use 0 for no bound"),
    "prefix_cache": boolean,
    "checkpoint_interval": integer(0, INT32_MAX, _CHOSEN),
    "num_checkpoints": integer(0, 1_048_576, _CHOSEN),
    "swap_bytes": integer(0, 2**63 - 1, "use 0 to compute preempted sequences again"),
    "num_speculative_tokens": integer(0, 64, "use 0 for no speculation"),
    "prefill_alignment": integer(0, 1_048_576, _CHOSEN),
    "debug_poison": boolean,
    "kv_dtype": choice(("auto", "float32", "bfloat16", "fp8", "int8")),
    "kv_ranges": _file,
    "state_dtype": choice(("float32", "bfloat16")),
    "row_buckets": _buckets,
    "token_buckets": _buckets,
    "enforce_eager": boolean,
    "run_ahead": boolean,
    "warmup": boolean,
    "compilation_cache": boolean,
    "tensor_parallel_size": integer(1, 65_536, "use 1 for one device"),
    "max_logprobs": integer(0, 65_536, "the default is 20"),
    "max_logit_bias": integer(0, 65_536, "the default is 300"),
    "seed": integer(-(2**63), 2**64 - 1, "use a 64-bit integer"),
    "implementations": _implementations,
}
