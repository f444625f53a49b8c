"""Reading config.json: the parts that several families share. HF names appear in models/ alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybrid_jax.errors import ModelError
from hybrid_jax.fields import shown
from hybrid_jax.models.hf_fields import FULL, LINEAR, SLIDING, checked
from hybrid_jax.specs import Activation, RopeSpec

LEGACY_LAYER_TYPES = {"attention": FULL, "mamba": LINEAR}
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config: multimodal checkpoints nest it in `text_config`."""
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise ModelError(f"text_config of config.json must be an object, got {shown(text)}")
    text = dict(text)
    for key in ("eos_token_id", "tie_word_embeddings"):
        if text.get(key) is None and config.get(key) is not None:
            text[key] = config[key]
    return checked(text, "config.json")


def required(config: Mapping[str, Any], key: str) -> Any:
    """config[key], or a ModelError that names the missing field."""
    if config.get(key) is None:
        raise ModelError(
            f"config.json of model_type {config.get('model_type')!r} has no {key!r}; add it"
        )
    return config[key]


def layer_types(
    config: Mapping[str, Any], fallback: Callable[[int], str], allowed: Sequence[str]
) -> list[str]:
    """One layer type per layer: the explicit list first, the family's rule otherwise.

    Raises:
        ModelError: the list has the wrong length or a type that the family does not have.
    """
    count = required(config, "num_hidden_layers")
    explicit = config.get("layer_types") or config.get("layers_block_type")
    if explicit is None:
        return [fallback(i) for i in range(count)]
    types = [str(LEGACY_LAYER_TYPES.get(t, t)) for t in explicit]
    if len(types) != count:
        raise ModelError(
            f"layer_types lists {len(types)} layers but num_hidden_layers is {count}; "
            "make them agree"
        )
    for i, kind in enumerate(types):
        if kind not in allowed:
            raise ModelError(
                f"layer {i} is {kind!r} in layer_types; {config.get('model_type')} has "
                f"{', '.join(allowed)}"
            )
    return types


def activation(config: Mapping[str, Any], default: str = "silu") -> Activation:
    """The feed-forward's activation by `hidden_act` or `hidden_activation`."""
    name = config.get("hidden_activation") or config.get("hidden_act") or default
    if name not in ACTIVATIONS:
        raise ModelError(f"hidden_act {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def rope_parameters(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """`rope_parameters` of one layer type; old files' rope_theta and rope_scaling are folded in."""
    params = config.get("rope_parameters") or {}
    if FULL in params or SLIDING in params:
        params = params.get(kind) or {}
    params = dict(params)
    if not params and config.get("rope_scaling"):
        params.update(config["rope_scaling"])
    params.setdefault("rope_type", params.pop("type", None) or "default")
    for key in ("rope_theta", "partial_rotary_factor"):
        if params.get(key) is None and config.get(key) is not None:
            params[key] = config[key]
    return params


def rope_spec(
    params: Mapping[str, Any],
    head_dim: int,
    *,
    theta: float,
    max_position: int,
    partial: float = 1.0,
) -> RopeSpec:
    """A RopeSpec from `rope_parameters`; `theta` and `partial` are the family's defaults."""
    kind = params.get("rope_type", "default")
    base = float(params.get("rope_theta") or theta)
    dim = int(head_dim * float(params.get("partial_rotary_factor") or partial))
    if kind in ("default", "mrope"):
        return RopeSpec(base, dim)
    factor = float(params.get("factor") or 1.0)
    original = int(params.get("original_max_position_embeddings") or max_position)
    if kind == "linear":
        return RopeSpec(base, dim, "linear", factor)
    if kind == "llama3":
        low, high = float(params["low_freq_factor"]), float(params["high_freq_factor"])
        return RopeSpec(base, dim, "llama3", factor, low, high, original)
    if kind == "yarn":
        return _yarn(params, base, dim, factor, original)
    raise ModelError(f"rope_type {kind!r} is not supported; known: default, linear, llama3, yarn")


def _yarn(
    params: Mapping[str, Any], base: float, dim: int, factor: float, original: int
) -> RopeSpec:
    import math

    scale = lambda s, m: 1.0 if s <= 1 else 0.1 * m * math.log(s) + 1.0  # noqa: E731
    attention = params.get("attention_factor")
    if attention is None:
        mscale, all_dim = params.get("mscale"), params.get("mscale_all_dim")
        if mscale and all_dim:
            attention = scale(factor, mscale) / scale(factor, all_dim)
        else:
            attention = scale(factor, 1.0)
    return RopeSpec(
        base,
        dim,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        attention_factor=float(attention),
        truncate=bool(params.get("truncate", True)),
    )


def common(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `ModelConfig` fields that every family reads alike."""
    return {
        "model_type": config["model_type"],
        "vocab_size": required(config, "vocab_size"),
        "hidden_size": required(config, "hidden_size"),
        "max_position": config.get("max_position_embeddings", 32768),
        "eos_token_ids": config.get("eos_token_id", ()),
    }
