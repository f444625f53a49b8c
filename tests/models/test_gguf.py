"""GGUF files: tensors, configs and tokenizers come out as they went in; bad files say why."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_jax.errors import ModelError
from hybrid_jax.generate import dense_logits
from hybrid_jax.loading import load_model
from hybrid_jax.loading.gguf import GGUFSource
from hybrid_jax.models import config_from_hf
from tests.helpers import tiny

gguf = pytest.importorskip("gguf")
Q = gguf.GGMLQuantizationType

NAMES = {  # hub -> GGUF, within a layer
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS = {
    "qwen3": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(arch: str, hub: str) -> str:
    """The name that llama.cpp's converter gives a tensor."""
    if hub in OUTER:
        return OUTER[hub]
    _, _, layer, *path, kind = hub.split(".")
    return f"blk.{layer}.{(NAMES | NORMS[arch])['.'.join(path)]}.{kind}"


def write_gguf(
    path: Path, name: str, seed: int = 0, kind: Any = Q.F32, extra: Callable | None = None
) -> dict[str, np.ndarray]:
    """Converts a tiny checkpoint as llama.cpp does; returns the weights as rounded to `kind`."""
    config, arch = tiny.TINY[name], name.split("-")[0]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if arch == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_freq_base(1e6)
    if name == "gemma3-linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 3)
    if name == "qwen3":
        writer.add_rope_freq_base(1e4)
    if name == "qwen3-yarn":
        writer.add_rope_freq_base(1e6)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
    if extra is not None:
        extra(writer)
    rounded = {}
    for hub, array in tiny.tensors(name, seed).items():
        offset = np.float32(arch == "gemma3" and hub.endswith("norm.weight"))
        if array.ndim == 1:
            writer.add_tensor(gguf_name(arch, hub), array + offset)
            rounded[hub] = array
        else:
            data = gguf.quantize(array, kind)
            writer.add_tensor(gguf_name(arch, hub), data, raw_dtype=kind)
            rounded[hub] = gguf.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return rounded


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_1], ids=lambda k: k.name)
@pytest.mark.parametrize("name", ["gemma3", "qwen3"])
def test_tensors_come_back(tmp_path: Path, name: str, kind: Any) -> None:
    """Every hub tensor, norms without their offset, in every storage type."""
    expected = write_gguf(tmp_path / "model.gguf", name, kind=kind)
    source = GGUFSource(tmp_path / "model.gguf")
    assert set(source.names()) == set(expected)
    for hub, array in expected.items():
        got = source.get(hub)
        assert got.shape == array.shape
        np.testing.assert_allclose(got.astype(np.float32), array, rtol=0, atol=2e-7, err_msg=hub)


@pytest.mark.parametrize("name", ["gemma3", "gemma3-linear", "qwen3", "qwen3-yarn"])
def test_same_logits_as_the_directory(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config from metadata describes the same model as config.json."""
    if name.startswith("gemma3"):  # the format has no word for another scale
        monkeypatch.setitem(tiny.TINY[name], "query_pre_attn_scalar", tiny.TINY[name]["head_dim"])
    tiny.write_checkpoint(name, tmp_path / "hf", 0)
    write_gguf(tmp_path / "model.gguf", name)
    prompt = [int(i) for i in np.random.default_rng(0).integers(0, tiny.VOCAB_SIZE, 64)]
    expected = dense_logits(load_model(tmp_path / "hf", dtype="float32"), prompt)
    loaded = load_model(tmp_path / "model.gguf", dtype="float32")
    np.testing.assert_allclose(dense_logits(loaded, prompt), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits), ids=lambda k: k.name)
def test_dequantises_every_type_of_the_package(tmp_path: Path, kind: Any) -> None:
    """In chunks, the result is the package's own, on random bytes."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (6, 512 // block * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybrid_jax.loading.gguf_file._CHUNK", 1000)
        got = GGUFSource(tmp_path / "model.gguf").get("model.embed_tokens.weight")
        expected = gguf.dequantize(data, kind)
    np.testing.assert_array_equal(got.astype(np.float32), expected)


def test_chat_models_stop_at_the_end_of_turn(tmp_path: Path) -> None:
    """Both stop tokens, although the file names one."""

    def chat(writer: Any) -> None:
        writer.add_token_list(["<eos>", "<end_of_turn>", "a"])
        writer.add_token_types([3, 3, 1])
        writer.add_eos_token_id(0)
        writer.add_chat_template("{{ messages }}")

    write_gguf(tmp_path / "model.gguf", "gemma3", extra=chat)
    assert GGUFSource(tmp_path / "model.gguf").config()["eos_token_id"] == [0, 1]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_truncated_files_say_so(tmp_path: Path, share: float) -> None:
    """Cut anywhere: in the magic, the header, the data."""
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match="truncated|cannot be read"):
        GGUFSource(path)


def test_bad_files_say_what_is_wrong(tmp_path: Path) -> None:
    """Other formats, other architectures, parts of a split model."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ModelError, match="not a GGUF file"):
        GGUFSource(path)
    for arch, extra, message in (
        ("llama", None, "architecture 'llama'.*supported: gemma3, qwen3"),
        ("qwen3", ("split.count", 3), "split model"),
    ):
        writer = gguf.GGUFWriter(path, arch)
        if extra:
            writer.add_uint16(*extra)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ModelError, match=message):
            GGUFSource(path)


def test_tokenizers_that_cannot_be_built(tmp_path: Path) -> None:
    """No vocabulary is no tokenizer; a vocabulary of another kind is an error."""

    def other(writer: Any) -> None:
        writer.add_tokenizer_model("rwkv")
        writer.add_token_list(["a"])

    write_gguf(tmp_path / "without.gguf", "qwen3")
    assert GGUFSource(tmp_path / "without.gguf").tokenizer() is None
    write_gguf(tmp_path / "other.gguf", "qwen3", extra=other)
    with pytest.raises(ModelError, match="tokenizer of kind 'rwkv'"):
        GGUFSource(tmp_path / "other.gguf").tokenizer()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_any_value_in_any_metadata_is_accepted_or_refused(tmp_path: Path, kind: str) -> None:
    """Values of other types, missing keys and ids that name no token: a ModelError or a result."""

    def chat(writer: Any) -> None:
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(["<eos>", "<end_of_turn>", "a", "b", "ab"])
        writer.add_token_types([3, 3, 1, 1, 1])
        writer.add_token_scores([0.0] * 5)
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_chat_template("{{ messages }}")

    write_gguf(tmp_path / "model.gguf", "gemma3", extra=chat)
    source, refused = GGUFSource(tmp_path / "model.gguf"), 0
    metadata = source.file.metadata
    assert source.tokenizer() is not None and config_from_hf(source.config())
    for key, value in list(metadata.items()):
        for other in (None, -1, 0, 99, 0.5, "x", ["x"], [5], np.arange(3), np.array("x"), True):
            metadata[key] = other
            for read in (lambda: config_from_hf(source.config()), source.tokenizer):
                try:
                    read()
                except ModelError as error:
                    refused += 1
                    assert "\n" not in str(error)
        metadata[key] = value
    assert refused > 100


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence with the command that installs it."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r'pip install "hybrid-jax\[gguf\]"'):
        GGUFSource(tmp_path / "model.gguf")


TEXTS = [
    "Hello, world! It's 12345.67",
    "  leading and trailing  ",
    "a  b   c    d",
    "\n\n\ttabs\r\nlines\n",
    "naïve café e\u0301 ﬁ",
    "こんにちは世界 Привет मस्ते مرحبا",
    "👩‍👩‍👧‍👦🏳️‍🌈 \U0001f9ff",
    "x" * 40 + " " * 40 + "=" * 40,
    "",
]


def test_byte_level_tokenizer(tmp_path: Path) -> None:
    """Equal to the tokenizer it was written from: ids, text, special tokens, template."""
    tokenizers = pytest.importorskip("tokenizers")
    from hybrid_jax.loading.gguf_tokenizer import SPLITS

    original = tokenizers.Tokenizer(tokenizers.models.BPE())
    original.normalizer = tokenizers.normalizers.NFC()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLITS["qwen2"]), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    original.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    original.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    original.train_from_iterator([Path(__file__).read_text(), *TEXTS], trainer)
    size = original.get_vocab_size()
    original.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    original.add_tokens(["<think>"])
    merges = [" ".join(pair) for pair in json.loads(original.to_str())["model"]["merges"]]
    vocabulary = sorted(original.get_vocab(), key=original.get_vocab().__getitem__)

    def tokenizer(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list([*vocabulary, "[PAD]"])
        writer.add_token_types([1] * size + [3, 3, 4, 5])
        writer.add_token_merges(merges)
        writer.add_eos_token_id(size)
        writer.add_add_bos_token(False)
        writer.add_chat_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")

    write_gguf(tmp_path / "model.gguf", "qwen3", extra=tokenizer)
    built = GGUFSource(tmp_path / "model.gguf").tokenizer()
    for text in [*TEXTS, "<think>so</think> end<|im_end|>\n"]:
        ids = original.encode(text).ids
        assert built.encode(text) == ids
        assert built.decode(ids, skip_special_tokens=True) == original.decode(ids)
    assert (built.eos_token, built.bos_token) == ("<|endoftext|>", None)
    chat = built.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "hi<|im_end|>"


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """Equal to SentencePiece itself on a vocabulary with byte fallback and runs of spaces."""
    spm = pytest.importorskip("sentencepiece")
    spaces = ["▁" * n for n in range(2, 8)]
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(__file__).read_text().splitlines()),
        model_prefix=str(tmp_path / "spm"),
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        user_defined_symbols=[*spaces, "\n", "\n\n"],
        minloglevel=2,
    )
    model = spm.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    kinds = [
        (model.is_unknown, 2),
        (model.is_control, 3),
        (model.is_unused, 5),
        (model.is_byte, 6),
    ]
    user = {*spaces, "\n", "\n\n"}

    def tokenizer(writer: Any) -> None:
        ids = range(model.vocab_size())
        pieces = [model.id_to_piece(i) for i in ids]
        types = [
            next((t for test, t in kinds if test(i)), 4 if pieces[i] in user else 1) for i in ids
        ]
        writer.add_tokenizer_model("llama")
        # The converter writes user-defined pieces with real spaces.
        writer.add_token_list([p.replace("▁", " ") if p in user else p for p in pieces])
        writer.add_token_scores([model.get_score(i) for i in ids])
        writer.add_token_types(types)
        writer.add_bos_token_id(model.bos_id())
        writer.add_eos_token_id(model.eos_id())
        writer.add_unk_token_id(model.unk_id())

    write_gguf(tmp_path / "model.gguf", "gemma3", extra=tokenizer)
    built = GGUFSource(tmp_path / "model.gguf").tokenizer()
    for text in TEXTS:
        ids = model.encode(text)
        assert built.encode(text) == [model.bos_id(), *ids]
        assert built.decode(built.encode(text), skip_special_tokens=True) == text
