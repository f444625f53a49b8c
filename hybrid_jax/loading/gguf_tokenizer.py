"""A transformers tokenizer from the metadata of a GGUF file.

Two kinds: `llama`, a SentencePiece BPE vocabulary with byte fallback as Gemma uses it, and `gpt2`,
a byte-level BPE with an explicit list of merges as Qwen uses it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_jax.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

Metadata = dict[str, Any]

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # the token types of the format

# How a byte-level vocabulary cuts text into words, by `tokenizer.ggml.pre`.
SPLITS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def build_tokenizer(path: Path, metadata: Metadata) -> "PreTrainedTokenizerFast":
    """The tokenizer of a GGUF file, with its special tokens and chat template.

    Raises:
        ModelError: the vocabulary is of another kind.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("llama", "gpt2"):
        raise ModelError(
            f"{str(path)!r} has a tokenizer of kind {kind!r}, which is not supported; "
            "use token ids, or the tokenizer of the original model"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", np.full(len(tokens), NORMAL)).tolist()
    if kind == "llama":
        backend = _sentencepiece(tokens, types, metadata)
    else:
        backend = _byte_level(path, tokens, types, metadata)
    _add_tokens(backend, tokens, types)
    special = _special_tokens(tokens, metadata)
    # Without the flag llama.cpp adds BOS to SentencePiece vocabularies only.
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _special_tokens(tokens: list[str], metadata: Metadata) -> dict[str, str | None]:
    """Named special tokens; None where the file has none, or transformers would invent them."""
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {f"{name}_token": None if i is None else tokens[i] for name, i in ids.items()}


def _add_tokens(backend: "Tokenizer", tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens (not shown in output) and user-defined ones: matched whole in any text."""
    from tokenizers import AddedToken

    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        chosen = [text for text, t in zip(tokens, types, strict=True) if t == kind]
        backend.add_tokens([AddedToken(text, normalized=False, special=special) for text in chosen])


def _sentencepiece(tokens: Sequence[str], types: Sequence[int], metadata: Metadata) -> "Tokenizer":
    """SentencePiece BPE: no prefix space, bytes for what the vocabulary lacks.

    The runs of spaces among the user-defined tokens are spelled with real spaces in the file and
    stay so: they match before spaces become U+2581.
    """
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    vocabulary = {text: i for i, text in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"].tolist()
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=_merges_from_scores(tokens, types, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _merges_from_scores(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """All ways to make a token of two others, best token first, as SentencePiece goes by score."""
    normal = {text for text, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    best_first = sorted(
        (i for i, kind in enumerate(types) if kind == NORMAL), key=lambda i: -scores[i]
    )
    return [
        (text[:cut], text[cut:])
        for text in map(tokens.__getitem__, best_first)
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]


def _byte_level(
    path: Path, tokens: Sequence[str], types: Sequence[int], metadata: Metadata
) -> "Tokenizer":
    """Byte-level BPE. Padding entries (unused) are left out: they stand for no text."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    split = metadata.get("tokenizer.ggml.pre")
    if split not in SPLITS:
        raise ModelError(
            f"{str(path)!r} splits words by rule {split!r}, which is not supported; "
            f"supported: {', '.join(SPLITS)}"
        )
    vocabulary = {text: i for i, text in enumerate(tokens) if types[i] != UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, fuse_unk=False, byte_fallback=False))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS[split]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend
