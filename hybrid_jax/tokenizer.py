"""Text to token ids and back, and chat templates, through Hugging Face tokenizers."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_jax.errors import InvalidRequest, ModelError
from hybrid_jax.fields import reason, shown

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


class HFTokenizer:
    """A tokenizer of the transformers library, reduced to what the library needs of it."""

    def __init__(self, tokenizer: Any) -> None:
        """Wraps a transformers `PreTrainedTokenizerBase`; takes no copy."""
        self.hf = tokenizer
        fast = bool(getattr(tokenizer, "is_fast", False))
        clean = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        # The Rust object decodes twice as fast; the clean-up lives in the Python wrapper only.
        self._rust = tokenizer.backend_tokenizer if fast and not clean else None

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, if there is one."""
        return self.hf.eos_token_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer adds to a prompt."""
        try:
            return list(self.hf.encode(text, add_special_tokens=add_special_tokens))
        except TypeError as error:  # what the tokenizers library raises for lone surrogates
            raise InvalidRequest(
                f"the text {ascii(text[:40])} is not valid Unicode; remove its lone surrogates"
            ) from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; incomplete characters become U+FFFD."""
        if self._rust is not None:
            return self._rust.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self.hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> str:
        """The prompt text of a conversation, by the tokenizer's chat template.

        Raises:
            InvalidRequest: a message has no role or content, there is no template, or it refuses
                the messages.
        """
        _check_messages(messages)
        if not self.hf.chat_template:
            raise InvalidRequest(
                "this model's tokenizer has no chat template; write the prompt as text instead"
            )
        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_args,
            )
        except Exception as error:  # templates are programs of the checkpoint and raise anything
            raise InvalidRequest(
                f"the chat template refuses these messages ({reason(error)}); change them or the "
                "template arguments"
            ) from error
        if not isinstance(text, str) or not text:
            raise InvalidRequest(
                f"the chat template made {shown(text)} of these messages; change them or the "
                "template arguments"
            )
        return text

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_args: Any
    ) -> tuple[str, list[int]]:
        """Prompt text and token ids of a conversation. Raises as `render_chat` does."""
        text = self.render_chat(messages, **template_args)
        return text, self.encode(text, add_special_tokens=False)  # the template wrote them


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise InvalidRequest("the conversation is empty; give at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                f"message {i} must have role and content, got {shown(message)}; use "
                "{'role': 'user', 'content': ...}"
            )
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise InvalidRequest(f"message {i} must have a role, got {shown(role)}; use 'user'")
        # A call of tools has no content; a list holds text among images and the like.
        if not isinstance(content, str | list | tuple) and not message.get("tool_calls"):
            raise InvalidRequest(
                f"the content of message {i} must be text, got {shown(content)}; use a string"
            )


def load_tokenizer(path: str | Path) -> HFTokenizer | None:
    """The tokenizer of a model directory; None when the directory has none.

    Raises:
        ModelError: the directory has tokenizer files that cannot be read.
    """
    path = Path(path)
    if not any((path / name).is_file() for name in _FILES):
        return None
    # It would advise to install PyTorch, which tokenizers do not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # seconds to import; models without one need it not

    try:
        return HFTokenizer(
            AutoTokenizer.from_pretrained(path, config=_bare_config(path), local_files_only=True)
        )
    except Exception as error:  # the library raises many types for one broken file
        raise ModelError(
            f"the tokenizer of {str(path)!r} cannot be read ({reason(error)}); copy its files again"
        ) from error


def _bare_config(path: Path) -> Any:
    """The default config of the model type, which may decide the tokenizer's class.

    Nothing else of config.json matters for a tokenizer, but AutoTokenizer would check all of it.
    """
    from transformers import AutoConfig, PreTrainedConfig

    try:
        return AutoConfig.for_model(json.loads((path / "config.json").read_text())["model_type"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return PreTrainedConfig()
