"""The two configurations: what the model is, and how the engine runs it."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from hybrid_jax.specs import LayerSpec, NormSpec


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


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs a model. `resolve` fills what depends on model and device.

    Zero or None means "choose for me" where noted.
    """

    max_num_seqs: int = 16
    max_model_len: int = 0  # tokens, prompt and output together; 0: the model's, at most 8,192
    max_num_batched_tokens: int = 512  # token budget of a step
    page_size: int = 16
    num_pages: int = 0  # pages per full-attention group; 0: enough for max_num_seqs full sequences,
    # within cache_bytes
    cache_bytes: int = 0  # upper bound for all caches; 0: from memory_utilization of the device
    memory_utilization: float = 0.9
    max_queue: int = 0  # waiting requests; 0: no bound
    kv_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: the activation dtype
    row_buckets: tuple[int, ...] = ()  # S; empty: powers of two up to max_num_seqs
    token_buckets: tuple[int, ...] = ()  # T of mixed steps; empty: powers of four up to the budget
    enforce_eager: bool = False
    run_ahead: bool = True  # launch step n + 1 before reading the tokens of step n
    warmup: bool = False  # compile every bucket before the first request
    compilation_cache: bool = True  # keep compiled steps across starts
    tensor_parallel_size: int = 1
    max_logprobs: int = 20
    max_logit_bias: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_model_len", "num_pages", "cache_bytes", "max_queue", "max_logprobs"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ValueError(f"memory_utilization must be in (0, 1], got {self.memory_utilization}")

    def resolve(self, model: ModelConfig) -> "EngineConfig":
        """A copy with max_model_len and the buckets filled in for `model`.

        Raises ValueError when a given value contradicts the model or another value.
        """
        max_len = self.max_model_len or min(model.max_position, 8192)
        rows = self.row_buckets or _geometric(1, self.max_num_seqs, 2)
        budget = max(self.max_num_batched_tokens, rows[-1])
        tokens = self.token_buckets or _geometric(min(32, budget), budget, 4)
        if list(rows) != sorted(set(rows)) or rows[-1] < self.max_num_seqs:
            raise ValueError(
                f"row_buckets {rows} must ascend and end at max_num_seqs {self.max_num_seqs} "
                "or more"
            )
        if list(tokens) != sorted(set(tokens)) or tokens[-1] < budget:
            raise ValueError(
                f"token_buckets {tokens} must ascend and end at the token budget {budget} or more"
            )
        return replace(
            self,
            max_model_len=max_len,
            row_buckets=rows,
            token_buckets=tokens,
            max_num_batched_tokens=budget,
        )


def _geometric(first: int, last: int, ratio: int) -> tuple[int, ...]:
    values = []
    while first < last:
        values.append(first)
        first *= ratio
    return (*values, last)
