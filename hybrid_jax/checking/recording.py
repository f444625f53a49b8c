"""Records what transformers makes of some prompts. The only module that needs torch."""

import importlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_jax.checking.prompts import long_prompt, short_prompts
from hybrid_jax.checking.reference import RecordedPrompt, Reference
from hybrid_jax.config import ModelConfig
from hybrid_jax.errors import HybridJaxError, InvalidRequest, ModelError
from hybrid_jax.fields import choice, integer, reason
from hybrid_jax.loading import DTYPES, load_config
from hybrid_jax.tokenizer import load_tokenizer

# Where hidden states are recorded: so many positions all over a prompt, and so many at its end.
SPREAD, LAST = 8, 8
NUM_TOKENS = 32  # greedy ones, per prompt
PAST_WINDOW = 64  # tokens by which the longest prompt passes the widest window
LONGEST = 2048  # tokens of a prompt


def record_reference(
    path: str | Path,
    *,
    prompts: Sequence[str] = (),
    num_tokens: int = NUM_TOKENS,
    dtype: str = "float32",
) -> Reference:
    """Runs transformers on a Hugging Face directory; nothing is downloaded.

    Args:
        path: the directory.
        prompts: texts; empty: some of our own, one of which is longer than the widest window.
        num_tokens: greedy tokens per prompt.
        dtype: of weights and activations.

    Raises:
        HybridJaxError: torch is not installed.
        ModelError: transformers cannot load the model, or leaves some of its weights random.
        InvalidRequest: texts were given and there is no tokenizer, or a prompt does not fit.
    """
    choice(DTYPES)("dtype", dtype)
    integer(1, 4096, f"use {NUM_TOKENS}")("num_tokens", num_tokens)
    config, raw = load_config(path)
    token_ids = _prompts(Path(path), config, prompts, num_tokens)
    torch, transformers = _import_torch()
    with _quiet(transformers), torch.inference_mode():
        model = _load(torch, transformers, Path(path), dtype)
        recorded = tuple(_record(torch, model, ids, num_tokens) for ids in token_ids)
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return Reference(raw, dtype, made_by, recorded)


def _import_torch() -> tuple[Any, Any]:
    try:
        return importlib.import_module("torch"), importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise HybridJaxError(
            f"{error.name} is not installed, and a reference is recorded with transformers on "
            "PyTorch; pip install torch (the CPU build is enough), or record it on another machine"
        ) from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Nothing is said of slower kernels or deprecated names, which no user here can change."""
    log = transformers.utils.logging
    level, has_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(level)
        if has_bars:
            log.enable_progress_bar()


def _prompts(
    path: Path, config: ModelConfig, texts: Sequence[str], num_tokens: int
) -> list[list[int]]:
    tokenizer = load_tokenizer(path)
    most = config.max_position - num_tokens
    if not texts:
        wanted = min(config.widest_window + PAST_WINDOW, LONGEST, most)
        found = short_prompts(tokenizer, config.vocab_size)
        return [*found, long_prompt(tokenizer, config.vocab_size, wanted)]
    if tokenizer is None:
        raise InvalidRequest(
            f"{str(path)!r} has no tokenizer for prompts of text; leave them out for random tokens"
        )
    found = [tokenizer.encode(text) for text in texts]
    for text, ids in zip(texts, found, strict=True):
        if not 0 < len(ids) <= most:
            raise InvalidRequest(
                f"the prompt {text[:40]!r} has {len(ids)} tokens; the model's positions leave room "
                f"for 1 to {most} before {num_tokens} more"
            )
    return found


def _load(torch: Any, transformers: Any, path: Path, dtype: str) -> Any:
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",  # the plainest, and the only one that caps scores
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # the library raises many types for a model it cannot load
        raise ModelError(
            f"transformers cannot load {str(path)!r} ({reason(error)}); give a Hugging Face "
            "directory of a model that it has"
        ) from error
    random = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if random:
        raise ModelError(
            f"transformers finds no weights for {', '.join(random[:3])} in {str(path)!r}; a "
            "reference with random weights is none"
        )
    return model.eval()


def _record(torch: Any, model: Any, token_ids: list[int], num_tokens: int) -> RecordedPrompt:
    before_norm: list[Any] = []  # transformers' own last hidden state is the one after it
    hook = model.get_decoder().norm.register_forward_pre_hook(
        lambda module, inputs: before_norm.append(inputs[0])
    )
    output = model(
        torch.tensor([token_ids]), output_hidden_states=True, use_cache=True, logits_to_keep=1
    )
    hook.remove()
    end = len(token_ids)
    spread = np.linspace(0, end - 1, SPREAD).astype(np.int32)
    positions = np.union1d(spread, np.arange(max(0, end - LAST), end, dtype=np.int32))
    hidden = torch.stack([*output.hidden_states[:-1], before_norm[0]])[:, 0]
    logits, tokens = output.logits[0, -1].float(), []
    while True:
        tokens.append(int(output.logits[0, -1].argmax()))
        if len(tokens) == num_tokens:
            break
        output = model(
            torch.tensor([tokens[-1:]]),
            past_key_values=output.past_key_values,
            use_cache=True,
            logits_to_keep=1,
        )
    return RecordedPrompt(
        np.array(token_ids, np.int32),
        np.array(tokens, np.int32),
        logits.numpy(),
        positions,
        hidden[:, positions].float().numpy(),
    )
