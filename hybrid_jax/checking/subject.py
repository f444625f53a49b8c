"""The model that is checked: sessions and engines on the same weights."""

from collections.abc import Mapping

from hybrid_jax.checking.findings import tie_margin
from hybrid_jax.config import EngineConfig
from hybrid_jax.decoding import Workspace
from hybrid_jax.engine.engine import Engine
from hybrid_jax.llm import LLM
from hybrid_jax.loading import LoadedModel
from hybrid_jax.runtime.runner import Runner

CHUNK = 256  # tokens that the engine feeds in one step; a multiple of all kernels' blocks
SHORT = 64  # tokens of the smaller bucket of sessions


class Subject:
    """A workspace whose steps hold any prompt in one go, and engines that feed it in chunks."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_num_seqs: int,
        max_model_len: int,
        implementations: Mapping[str, str] | None = None,
    ) -> None:
        """Makes the caches of both; steps compile when they are used.

        Raises ValueError as `Workspace` does.
        """
        self.model = model
        options = {"max_model_len": max_model_len, "implementations": dict(implementations or {})}
        self.space = Workspace(
            model,
            max_num_seqs=1,
            max_num_batched_tokens=max_model_len,
            token_buckets=tuple(sorted({min(SHORT, max_model_len), max_model_len})),
            num_checkpoints=2,
            **options,
        )
        # One bucket of rows: then batch mates are all that differs between a batch and a prompt
        # alone, and not the shape of a product, which would round otherwise.
        config = EngineConfig.of(
            {
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": CHUNK,
                "row_buckets": (max_num_seqs,),
                "token_buckets": (CHUNK,),
                **options,
            }
        )
        self._runner = Runner(model, config)

    @property
    def tie_margin(self) -> float:
        """Logits this close, in their deviations, may change places by rounding."""
        return tie_margin(self.model.dtype, len(self.model.config.layers))

    def open_llm(self) -> LLM:
        """An LLM with empty caches, for token ids. One at a time."""
        self._runner.reset()
        return LLM.from_engine(Engine(self._runner, None, stop_ids=self.model.stop_ids), None)
