"""GGUF files as a source of tensors: hub names, an equivalent of config.json, and the tokenizer.

What the conversion to GGUF changed is undone here: names, and the Gemma norms, which are stored
with the 1 already added. Neither architecture has permuted projections (those of Llama have).
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_jax.errors import ModelError
from hybrid_jax.fields import reason, shown
from hybrid_jax.loading.gguf_file import GGUFFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Metadata = dict[str, Any]

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Architecture:
    """How one `general.architecture` maps to the hub: norms by name, config, norm offset."""

    norms: dict[str, str]
    config: Callable[["GGUFFile"], dict[str, Any]]
    norm_offset: float = 0.0


class GGUFSource:
    """A `TensorSource` over one GGUF file.

    Raises:
        ModelError: not a GGUF file, truncated, of another architecture, or one part of several.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GGUFFile(path)
        name = self.file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise ModelError(
                f"{str(path)!r} has GGUF architecture {shown(name)}, which is not supported; "
                f"supported: {', '.join(sorted(ARCHITECTURES))}"
            )
        if self.file.metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(
                f"{str(path)!r} is one part of a split model; join the parts with llama.cpp's "
                "gguf-split --merge"
            )
        self._architecture = ARCHITECTURES[name]
        self._names = {self._hub_name(name): name for name in self.file.tensors}

    def config(self) -> dict[str, Any]:
        """An equivalent of config.json, from the metadata.

        Raises:
            ModelError: the metadata lack a key that the architecture needs, or hold another kind
                of value for it.
        """
        with _misfits_named(self.path):
            return self._architecture.config(self.file)

    def names(self) -> Collection[str]:
        """Hub names of all tensors; a tensor with no such name keeps its own."""
        return self._names.keys()

    def get(self, name: str) -> np.ndarray:
        """One tensor by hub name: dequantised to float32, or in its own float type."""
        array = self.file.get(self._names[name])
        if self._architecture.norm_offset and name.endswith("norm.weight"):
            return array.astype(np.float32) - np.float32(self._architecture.norm_offset)
        return array

    def tokenizer(self) -> "PreTrainedTokenizerFast | None":
        """The tokenizer that the metadata describe; None when they hold no vocabulary.

        Raises:
            ModelError: it is of a kind that is not supported, or contradicts itself.
        """
        if "tokenizer.ggml.tokens" not in self.file.metadata:
            return None
        from hybrid_jax.loading.gguf_tokenizer import build_tokenizer

        with _misfits_named(self.path):
            return build_tokenizer(self.path, self.file.metadata)

    def _hub_name(self, name: str) -> str:
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if match is None:
            return _OUTER.get(name, name)
        layer, leaf, kind = match.groups()
        hub = (_LAYER | self._architecture.norms).get(leaf)
        return name if hub is None else f"model.layers.{layer}.{hub}.{kind}"


@contextmanager
def _misfits_named(path: Path) -> Iterator[None]:
    """Turns what reading odd metadata raises into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except KeyError as error:
        raise ModelError(f"{str(path)!r} lacks {error.args[0]!r}; convert it again") from error
    except Exception as error:  # the tokenizers library raises nothing more precise
        raise ModelError(
            f"{str(path)!r} has metadata that do not fit ({reason(error)}); convert it again"
        ) from error


def _common_config(file: GGUFFile, prefix: str) -> dict[str, Any]:
    """What both architectures state in the same words."""
    metadata = file.metadata
    heads = metadata[f"{prefix}.attention.head_count"]
    hidden = metadata[f"{prefix}.embedding_length"]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise KeyError("token_embd.weight")
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        # The originals are bfloat16; as float16, which some files hold, Gemma overflows.
        "dtype": "float32" if embedding.type_name == "F32" else "bfloat16",
        "eos_token_id": stop_token_ids(metadata) or None,
        "head_dim": metadata.get(f"{prefix}.attention.key_length", hidden // heads),
        "hidden_size": hidden,
        "intermediate_size": metadata[f"{prefix}.feed_forward_length"],
        "max_position_embeddings": metadata[f"{prefix}.context_length"],
        "num_attention_heads": heads,
        "num_hidden_layers": metadata[f"{prefix}.block_count"],
        "num_key_value_heads": metadata.get(f"{prefix}.attention.head_count_kv", heads),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        # Stored in float32, where 1e-6 is 9.99999997e-07: the shortest decimal is what was meant.
        "rms_norm_eps": _shortest(metadata[f"{prefix}.attention.layer_norm_rms_epsilon"]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": embedding.shape[0],
    }


def _rope(metadata: Metadata, prefix: str, theta: float) -> dict[str, Any]:
    """`rope_parameters` of the layers that see the whole context."""
    rope = {"rope_type": "default", "rope_theta": metadata.get(f"{prefix}.rope.freq_base", theta)}
    scaling = metadata.get(f"{prefix}.rope.scaling.type", "none")
    if scaling == "none":
        return rope
    rope |= {"rope_type": scaling, "factor": metadata[f"{prefix}.rope.scaling.factor"]}
    if scaling == "yarn":
        original = metadata[f"{prefix}.rope.scaling.original_context_length"]
        rope["original_max_position_embeddings"] = original
    return rope


def _qwen3_config(file: GGUFFile) -> dict[str, Any]:
    config = _common_config(file, "qwen3")
    return config | {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
        "model_type": "qwen3",
        "rope_parameters": _rope(file.metadata, "qwen3", 1e6),
        "sliding_window": None,
        "use_sliding_window": False,
    }


def _gemma3_config(file: GGUFFile) -> dict[str, Any]:
    metadata, config = file.metadata, _common_config(file, "gemma3")
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    every = metadata.get("gemma3.attention.sliding_window_pattern", 6)
    sliding = [(i + 1) % every != 0 for i in range(layers)] if isinstance(every, int) else every
    # The scale of the scores is not in the file. llama.cpp knows the 27B model by its 62 layers as
    # the only one that does not scale by the head size.
    scalar = hidden // config["num_attention_heads"] if layers == 62 else config["head_dim"]
    local = metadata.get("gemma3.rope.freq_base_swa", 10000.0)
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.get("gemma3.final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": scalar,
        "rope_parameters": {
            "full_attention": _rope(metadata, "gemma3", 1e6),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "sliding_window": metadata["gemma3.attention.sliding_window"],
    }


def stop_token_ids(metadata: Metadata) -> list[int]:
    """End of sequence and, in chat models, end of turn.

    Files of chat models name only one of the two, so the usual spellings count as well there.
    """
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    if "tokenizer.chat_template" in metadata:
        ends = ("<end_of_turn>", "<|im_end|>", "<|endoftext|>", "<eos>")
        tokens, kinds = (metadata.get(f"tokenizer.ggml.{k}", ()) for k in ("tokens", "token_type"))
        control = zip(tokens, kinds, strict=False)
        ids += [i for i, (text, kind) in enumerate(control) if kind == 3 and text in ends]
    return list(dict.fromkeys(ids))


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


ARCHITECTURES = {
    "gemma3": Architecture(
        {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _gemma3_config,
        norm_offset=1.0,
    ),
    "qwen3": Architecture({"ffn_norm": "post_attention_layernorm"}, _qwen3_config),
}
