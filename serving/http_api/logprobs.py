"""Log probabilities in OpenAI's two formats."""

from collections.abc import Sequence
from typing import Any

from hybrid_jax.engine.types import TokenLogprob
from hybrid_jax.tokenizer import HFTokenizer


def token_text(tokenizer: HFTokenizer | None, token_id: int) -> str:
    """The text of a token on its own."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    return tokenizer.decode([token_id], skip_special_tokens=False)


def completion_logprobs(
    tokenizer: HFTokenizer | None,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    offset: int,
) -> dict[str, Any]:
    """The format of /v1/completions. `offset`: characters of all tokens before.

    A prompt's first token has no log probability: nothing comes before it.
    """
    tokens = [token_text(tokenizer, token_id) for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else entry.logprob for entry in logprobs],
        "top_logprobs": [
            None
            if entry is None
            else {token_text(tokenizer, token): value for token, value in entry.top.items()}
            for entry in logprobs
        ],
        "text_offset": offsets,
    }


def chat_logprobs(
    tokenizer: HFTokenizer | None, logprobs: Sequence[TokenLogprob]
) -> dict[str, Any]:
    """The format of /v1/chat/completions."""
    content = []
    for entry in logprobs:
        top = [_entry(tokenizer, token, value) for token, value in entry.top.items()]
        content.append(_entry(tokenizer, entry.token_id, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(tokenizer: HFTokenizer | None, token_id: int, logprob: float) -> dict[str, Any]:
    text = token_text(tokenizer, token_id)
    whole = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}
