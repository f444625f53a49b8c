"""Whether a request can be served at all, decided before anything is allocated for it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_jax.engine.cache_manager import CacheManager
from hybrid_jax.engine.types import Request, StepRunner
from hybrid_jax.errors import InvalidRequest
from hybrid_jax.fields import shown
from hybrid_jax.sampling_params import SamplingParams
from hybrid_jax.structured import GrammarCompiler, TokenMatcher

if TYPE_CHECKING:
    from hybrid_jax.config import EngineConfig


@dataclass(frozen=True)
class RequestValidator:
    """The limits of one engine."""

    runner: StepRunner
    cache: CacheManager
    has_tokenizer: bool
    grammars: GrammarCompiler | None

    @property
    def _config(self) -> "EngineConfig":
        return self.runner.config

    @property
    def _vocab_size(self) -> int:
        return self.runner.model_config.vocab_size

    def check(self, request: Request) -> int:
        """The request's max_tokens, clamped to what fits into max_model_len.

        Raises:
            InvalidRequest: the request can never be served; says which value and what to do.
        """
        self._check_prompt(request.prompt_token_ids)
        self._check_params(request.params)
        self._check_prefix(request)
        prompt = len(request.prompt_token_ids)
        max_tokens = min(request.params.max_tokens, self._config.max_model_len - prompt)
        # The last token is sampled but never fed, so it needs no room in the caches.
        fed = prompt + max_tokens - 1 + self._config.num_speculative_tokens
        shortage = self.cache.shortage(fed)
        if shortage:
            raise InvalidRequest(
                f"{prompt} prompt tokens and {max_tokens} new ones need {shortage}; "
                "shorten the prompt, lower max_tokens or raise num_pages"
            )
        return max_tokens

    def matcher(self, params: SamplingParams) -> TokenMatcher | None:
        """What holds one completion to `params.structured`. Raises InvalidRequest."""
        if params.structured is None:
            return None
        if self.grammars is None:
            raise InvalidRequest(
                f"structured output ({params.structured.source[0]}) needs a tokenizer and this "
                "model has none; leave it out"
            )
        return self.grammars.matcher(params.structured, may_end=not params.ignore_eos)

    def _check_prefix(self, request: Request) -> None:
        prefix, prompt = request.prefix, request.prompt_token_ids
        if (request.keep or prefix is not None) and request.params.num_sequences > 1:
            name = "best_of" if request.params.ranked else "n"
            raise InvalidRequest(
                f"a session has one completion at a time, got {name}="
                f"{request.params.num_sequences}; fork it instead"
            )
        if prefix is not None and prompt[: prefix.length] != prefix.token_ids:
            raise InvalidRequest(
                f"the prompt does not begin with the {prefix.length} tokens of its prefix; pass "
                "the tokens that were kept and then new ones"
            )

    def _check_prompt(self, token_ids: tuple[int, ...]) -> None:
        limit = self._config.max_model_len
        if not token_ids:
            raise InvalidRequest("the prompt is empty; give at least one token")
        if len(token_ids) > limit - 1:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens but max_model_len is {limit}, which "
                f"leaves {limit - 1} for it; shorten it or raise max_model_len"
            )
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocab_size:
            raise InvalidRequest(
                f"token id {shown(low if low < 0 else high)} is outside the vocabulary "
                f"[0, {self._vocab_size}); encode the prompt with this model's tokenizer"
            )

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count, most = getattr(params, name), self._config.max_logprobs
            if count is not None and count > most:
                raise InvalidRequest(
                    f"{name} is {count} but max_logprobs is {most}; ask for fewer or raise "
                    "max_logprobs"
                )
        if len(params.logit_bias) > self._config.max_logit_bias:
            raise InvalidRequest(
                f"logit_bias has {len(params.logit_bias)} entries but max_logit_bias is "
                f"{self._config.max_logit_bias}; send fewer or raise max_logit_bias"
            )
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if ids and max(ids) >= self._vocab_size:
                raise InvalidRequest(
                    f"{name} names token {max(ids)} but the vocabulary has {self._vocab_size}; "
                    "leave it out"
                )
        for name in params.logits_processors:
            if name not in self.runner.sampling_rows.processors:
                known = ", ".join(sorted(self.runner.sampling_rows.processors)) or "none"
                raise InvalidRequest(
                    f"logits processor {name!r} is not registered with the engine; give it as "
                    f"LLM(logits_processors=...) or use a known one: {known}"
                )
        self.matcher(params)
        if params.stop and not (self.has_tokenizer and params.detokenize):
            raise InvalidRequest(
                f"stop strings {list(params.stop)} need text, and this request makes none; use "
                "stop_token_ids, or a model with a tokenizer and detokenize=True"
            )
