"""Trains the byte-level BPE tokenizer and writes it in Hugging Face format.

python -m training.tokenizer --corpus DIR --out DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from training import corpus, recall
from training.config import BOS_ID, MAX_LENGTH, SPECIAL_TOKENS, VOCAB_SIZE

# Words and digits take their leading space; every digit is a token of its own, so that copying a
# number is copying tokens one by one whatever the neighbouring digits are.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FACTS_PER_NAME = 1000

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train(texts: list[str]) -> Tokenizer:
    """Train on `texts`; special tokens get the first ids, then the 256 bytes, then the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIAL_TOKENS[BOS_ID]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS_ID)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    pad, bos, eos, *roles = SPECIAL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
        "additional_special_tokens": roles,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="directory of corpus.json")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    chapters, held_out = corpus.load(args.corpus)
    # So many facts that every name becomes one token.
    facts = [
        f"{recall.Fact(name, '').stem} {i % 10}."
        for name in recall.NAMES
        for i in range(FACTS_PER_NAME)
    ]
    tokenizer = train(chapters + facts)
    save(tokenizer, args.out)
    tokens = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in held_out)
    size = sum(len(text.encode()) for text in held_out)
    split = [n for n in recall.NAMES if len(tokenizer.encode(f" {n}").ids) > 2]
    print(f"vocabulary {tokenizer.get_vocab_size()}, held-out bytes a token {size / tokens:.2f}")
    print(f"names of more than one token: {', '.join(split) or 'none'}")


if __name__ == "__main__":
    main()
