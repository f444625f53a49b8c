"""Models for lm-evaluation-harness: `pip install 'hybrid-jax[lm-eval]'`.

import lm_eval
from hybrid_jax.decoding.lm_eval import HybridLM

lm_eval.simple_evaluate(HybridLM("path/to/model"), tasks=["lambada_openai"])
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.progress import track

from hybrid_jax.decoding.sampling import generate
from hybrid_jax.decoding.scoring import loglikelihood
from hybrid_jax.decoding.workspace import Workspace
from hybrid_jax.errors import InvalidRequest
from hybrid_jax.loading import load_model
from hybrid_jax.sampling_params import SamplingParams
from hybrid_jax.tokenizer import HFTokenizer, load_tokenizer

try:
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        get_rolling_token_windows,
        make_disjoint_window,
    )
except ImportError as error:
    raise ImportError(
        "hybrid_jax.decoding.lm_eval needs lm-evaluation-harness; pip install 'hybrid-jax[lm-eval]'"
    ) from error


class HybridLM(LM):
    """A model with its tokenizer, as the harness wants it.

    Requests with one context compute it once: the others are forks.
    """

    def __init__(
        self, path: str | Path, *, dtype: str = "auto", max_gen_toks: int = 256, **options: Any
    ) -> None:
        """Loads a model.

        Args:
            path: a model directory with a tokenizer.
            dtype: of weights and activations; "auto" takes the checkpoint's.
            max_gen_toks: tokens to generate when a task does not say.
            **options: fields of `EngineConfig`; longer texts than `max_model_len` lose their
                beginning.

        Raises:
            ModelError: it is no model. InvalidRequest: it has no tokenizer.
        """
        super().__init__()
        model = load_model(path, dtype=dtype, kv_ranges=options.get("kv_ranges", ""))
        tokenizer = load_tokenizer(model.source)
        if tokenizer is None:
            raise InvalidRequest(f"{path} has no tokenizer, and tasks are text; add tokenizer.json")
        self.workspace = Workspace(model, **options)
        self.tokenizer: HFTokenizer = tokenizer
        self.max_gen_toks = max_gen_toks

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Per (context, continuation): its log probability, and whether it is greedy."""
        pairs = [self._pair(*request.args) for request in requests]
        return self._score(pairs)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Per (text,): the log probability of all of it, in windows of the longest context."""
        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self._encode(text, special=False),
                prefix_token=self._first,
                max_seq_len=self.workspace.config.max_model_len - 1,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            totals.append(sum(logprob for logprob, _ in self._score(pairs)))
        return totals

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Per (context, options): text up to the first of the strings in `options["until"]`."""
        texts = []
        for request in track(requests, "generate", transient=True):
            context, options = request.args  # pyright: ignore[reportAssignmentType]  # a bare tuple
            texts.append(self._generate(context, dict(options)))
        return texts

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        count = int(options.get("max_gen_toks", self.max_gen_toks))
        sample = options.get("do_sample", False)
        params = SamplingParams(
            temperature=float(options.get("temperature", 1.0)) if sample else 0.0,
            top_p=float(options.get("top_p", 1.0)),
            top_k=int(options.get("top_k", 0)),
            max_tokens=count,
        )
        prompt = self._encode(context)[-(self.workspace.config.max_model_len - count) :]
        with self.workspace.session() as session:
            session.prefill(prompt)
            text = self.tokenizer.decode(generate(session, params))
        ends = [text.index(stop) for stop in until if stop and stop in text]
        return text[: min(ends, default=len(text))]

    @property
    def _first(self) -> int:
        """What stands before a text without context."""
        hf = self.tokenizer.hf
        first = hf.bos_token_id if hf.bos_token_id is not None else hf.eos_token_id
        return int(first) if first is not None else self._encode("\n", special=False)[0]

    def _encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Both as tokens; spaces between them belong to the continuation, as in the harness."""
        if not context:
            return [self._first], self._encode(continuation, special=False)
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        before = self._encode(context)
        return before, self._encode(context + continuation)[len(before) :]

    def _score(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, bool]]:
        """Per pair, those with the same context one after the other."""
        most = self.workspace.config.max_model_len
        cut = []
        for before, after in pairs:
            cut.append((tuple(before)[-max(1, most - len(after)) :], tuple(after)))
        order = sorted(range(len(cut)), key=lambda i: cut[i])
        scores: dict[int, tuple[float, bool]] = {}
        for context, same in groupby(order, key=lambda i: cut[i][0]):
            with self.workspace.session() as trunk:
                trunk.prefill(context)
                for i in same:
                    with trunk.fork(1)[0] as fork:
                        score = loglikelihood(fork, [], cut[i][1])
                    scores[i] = (score.logprob, score.is_greedy)
        return [scores[i] for i in range(len(cut))]
