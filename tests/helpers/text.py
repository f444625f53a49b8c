"""A tokenizer for tiny checkpoints."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_jax.tokenizer import HFTokenizer
from tests.helpers import tiny


def byte_tokenizer() -> HFTokenizer:
    """One token per byte below the tiny checkpoints' vocabulary size: token ids are ASCII codes."""
    alphabet = [chr(b) if 33 <= b <= 126 else chr(256 + b) for b in range(33)]
    alphabet += [chr(b) for b in range(33, 127)] + [chr(256 + 33)]
    vocab = {letter: b for b, letter in enumerate(alphabet)}
    assert len(vocab) == tiny.VOCAB_SIZE
    rust = Tokenizer(models.BPE(vocab, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))
