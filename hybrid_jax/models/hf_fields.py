"""What each field of config.json may be, whatever the family, and the refusal of all else."""

from collections.abc import Mapping
from typing import Any

from hybrid_jax.errors import ModelError
from hybrid_jax.fields import INT32_MAX, Check, boolean, integer, number, or_none, shown, tuple_of

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def checked(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`fields` with every known one checked. Null is the same as absent where families may choose.

    Raises:
        ModelError: a field has a value that no model can have; the message names it and `where`.
    """
    try:
        return {
            name: _CHECKS[name](f"{name} of {where}", value) if name in _CHECKS else value
            for name, value in fields.items()
            if value is not None or name in _NULLABLE
        }
    except ValueError as error:
        raise ModelError(str(error)) from error


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, got {shown(value)}; correct it")
    return checked(value, name)


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {shown(value)}; correct it")
    return value


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """One id or a list of them, as a tuple."""
    return _ids(name, value if isinstance(value, list | tuple) else [value])


_CORRECT = "correct it"
# config.json and generation_config.json may both have a list; the sampler has room for 64 ids.
_ids = tuple_of(integer(0, INT32_MAX, _CORRECT), most=32)
_some = integer(1, 2**24, _CORRECT)  # sizes and counts
_any = integer(0, 2**24, _CORRECT)  # the same, where families take 0 as absent
_positive = number(0.0, 1e30, _CORRECT, above=True)
_NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
_CHECKS: dict[str, Check] = {
    "attention_bias": boolean,
    "attention_factor": _positive,
    "attn_logit_softcapping": or_none(_positive),
    "beta_fast": _positive,
    "beta_slow": _positive,
    "decoder_sparse_step": _any,
    "eos_token_id": _token_ids,
    "factor": _positive,
    "final_logit_softcapping": or_none(_positive),
    "full_attention_interval": _any,
    "head_dim": _any,
    "hidden_act": _string,
    "hidden_activation": _string,
    "hidden_size": _some,
    "high_freq_factor": _positive,
    "intermediate_size": _any,
    "layer_types": tuple_of(_string, most=10_000),
    "layers_block_type": tuple_of(_string, most=10_000),
    "linear_allow_neg_eigval": boolean,
    "linear_conv_kernel_dim": integer(2, 1024, _CORRECT),
    "linear_key_head_dim": _some,
    "linear_num_key_heads": _some,
    "linear_num_value_heads": _some,
    "linear_value_head_dim": _some,
    "low_freq_factor": _positive,
    "max_position_embeddings": integer(2, INT32_MAX, _CORRECT),
    "max_window_layers": _any,
    "mlp_only_layers": tuple_of(_any, most=10_000),
    "model_type": _string,
    "moe_intermediate_size": _any,
    "mscale": number(0.0, 1e30, _CORRECT),
    "mscale_all_dim": number(0.0, 1e30, _CORRECT),
    "norm_topk_prob": boolean,
    "num_attention_heads": _some,
    "num_experts": integer(0, 65_536, _CORRECT),
    "num_experts_per_tok": _any,
    "num_hidden_layers": integer(1, 10_000, _CORRECT),
    "num_key_value_heads": _some,
    "original_max_position_embeddings": integer(1, INT32_MAX, _CORRECT),
    "partial_rotary_factor": number(0.0, 1.0, _CORRECT, above=True),
    "query_pre_attn_scalar": _positive,
    "rms_norm_eps": number(0.0, 1.0, _CORRECT),
    "rope_local_base_freq": _positive,
    "rope_parameters": _object,
    "rope_scaling": _object,
    "rope_theta": _positive,
    "rope_type": _string,
    "shared_expert_intermediate_size": _any,
    "sliding_window": or_none(integer(0, INT32_MAX, _CORRECT)),
    "sliding_window_pattern": _any,
    "tie_word_embeddings": boolean,
    "truncate": boolean,
    "type": _string,
    "use_bidirectional_attention": boolean,
    "use_sliding_window": boolean,
    "vocab_size": _some,
    # rope_parameters may have one object per kind of layer
    FULL: _object,
    SLIDING: _object,
}
