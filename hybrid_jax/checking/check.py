"""All checks of a model, one after the other."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import jax

from hybrid_jax.checking.behaviour import (
    check_isolation,
    check_long_prompt,
    check_repetition,
    check_seed,
    check_turns,
)
from hybrid_jax.checking.compare import LayerError, compare, compare_configs
from hybrid_jax.checking.findings import Finding
from hybrid_jax.checking.prompts import long_prompt, short_prompts
from hybrid_jax.checking.recording import NUM_TOKENS
from hybrid_jax.checking.reference import Reference
from hybrid_jax.checking.subject import CHUNK, Subject
from hybrid_jax.errors import NonFiniteLogits, StateOwnerMismatch, StepFailed
from hybrid_jax.fields import integer
from hybrid_jax.llm import find_tokenizer
from hybrid_jax.loading import LoadedModel, load_model

NUM_PROMPTS = 8  # at most, in the batch
NUM_TURNS = 3
PAST = 37  # tokens that the long prompt has besides whole windows and chunks


@dataclass(frozen=True)
class CheckReport:
    """What `check_model` found."""

    findings: tuple[Finding, ...]
    layers: tuple[LayerError, ...]  # against the reference; empty without one
    dtype: str  # of the weights and activations

    @property
    def failed(self) -> bool:
        """Whether any check failed; warnings are none."""
        return any(finding.verdict == "fail" for finding in self.findings)


def check_model(
    path: str | Path,
    reference: Reference | None = None,
    *,
    dtype: str = "auto",
    num_tokens: int = 0,
    long_tokens: int = 0,
    seed: int = 0,
    implementations: Mapping[str, str] | None = None,
) -> CheckReport:
    """Loads a model and runs every check on it.

    Args:
        path: a Hugging Face directory, an Orbax checkpoint or a GGUF file.
        reference: of the same weights; its prompts are then used. Without one, the model is only
            held against itself.
        dtype: of weights and activations; auto: the checkpoint's. float32 is by far the sharpest.
        num_tokens: tokens of each greedy text; 0: the reference's number, or 32.
        long_tokens: tokens of the long prompt; 0: twice the widest window and more.
        seed: of the sampled texts.
        implementations: as `EngineConfig.implementations`.

    Raises:
        ModelError: it is no model this library can run.
        ReferenceFileError: the reference is of a model of another shape.
        ValueError: a number is out of range, or the model has not as many positions.
    """
    integer(0, 4096, "use 0 to have it chosen")("num_tokens", num_tokens)
    integer(0, 1_048_576, "use 0 to have it chosen")("long_tokens", long_tokens)
    model = load_model(path, dtype=dtype)
    texts = _texts(model, reference, num_tokens, long_tokens)
    # All that was recorded is compared, however few or short the texts are.
    compared = () if reference is None else reference.prompts
    longest = max([texts.longest, *(len(r.prompt) + len(r.tokens) for r in compared)])
    subject = Subject(
        model,
        max_num_seqs=len(texts.prompts),
        max_model_len=longest,
        implementations=implementations,
    )
    # TPUs and GPUs would otherwise round the factors of float32 products.
    exact = model.dtype == "float32"
    with jax.default_matmul_precision("highest") if exact else nullcontext():
        return _run(subject, texts, reference, seed)


@dataclass(frozen=True)
class _Texts:
    """What the checks feed, as token ids."""

    prompts: list[list[int]]
    long: list[int]
    turns: list[list[int]]
    num_tokens: int

    @property
    def longest(self) -> int:
        """Positions that a sequence needs."""
        turns = sum(map(len, self.turns)) + len(self.turns) * self.num_tokens
        return max(max(map(len, [*self.prompts, self.long])) + self.num_tokens, turns)


def _texts(
    model: LoadedModel, reference: Reference | None, num_tokens: int, long_tokens: int
) -> _Texts:
    config, tokenizer = model.config, find_tokenizer(model.source)
    own = short_prompts(tokenizer, config.vocab_size)
    recorded = () if reference is None else reference.prompts[:NUM_PROMPTS]
    prompts = [r.prompt.tolist() for r in recorded]
    if len(prompts) < 2:  # one alone has no batch mates
        prompts += own
    num_tokens = num_tokens or (len(recorded[0].tokens) if recorded else NUM_TOKENS)
    if num_tokens >= config.max_position:
        raise ValueError(
            f"num_tokens {num_tokens} leave no room for a prompt in the model's "
            f"{config.max_position} positions; use fewer"
        )
    window = config.widest_window
    long_tokens = long_tokens or min(
        2 * max(window, CHUNK) + PAST, config.max_position - num_tokens
    )
    # The first turn is long enough to be found in the cache, whatever the granularity of hits.
    turns = [long_prompt(tokenizer, config.vocab_size, CHUNK), *own[: NUM_TURNS - 1]]
    long = long_prompt(tokenizer, config.vocab_size, long_tokens)
    return _Texts(prompts, long, turns, num_tokens)


def _run(subject: Subject, texts: _Texts, reference: Reference | None, seed: int) -> CheckReport:
    findings: list[Finding] = []
    layers: tuple[LayerError, ...] = ()
    if reference is not None:
        findings.append(compare_configs(subject.model.source, reference))
        against, layers = compare(subject.space, reference)
        findings += against
    count = texts.num_tokens
    checks = {
        "isolation": lambda: _isolation_and_repetition(subject, texts, reference),
        "long prompt": lambda: [check_long_prompt(subject, texts.long, count)],
        "turns": lambda: check_turns(subject, texts.turns, count),
        "seed": lambda: [check_seed(subject, texts.prompts, count, seed)],
    }
    for name, check in checks.items():
        try:
            findings += check()
        except (NonFiniteLogits, StateOwnerMismatch, StepFailed) as error:
            findings.append(Finding(name, "fail", math.nan, 0, f"a text was ended: {error}"))
    return CheckReport(tuple(findings), layers, subject.model.dtype)


def _isolation_and_repetition(
    subject: Subject, texts: _Texts, reference: Reference | None
) -> list[Finding]:
    found, greedy = check_isolation(subject, texts.prompts, texts.num_tokens)
    theirs = None
    if reference is not None:
        theirs = [r.tokens[: texts.num_tokens].tolist() for r in reference.prompts[:NUM_PROMPTS]]
    return [*found, check_repetition(greedy, theirs, subject.model.stop_ids)]
