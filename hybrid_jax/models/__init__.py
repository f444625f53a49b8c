"""The model families, by the `model_type` of config.json."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax

from hybrid_jax.config import ModelConfig
from hybrid_jax.errors import ModelError
from hybrid_jax.models import gemma, lara_mini, olmo_hybrid, qwen3, qwen3_next
from hybrid_jax.models.decoder import Params, abstract_params
from hybrid_jax.models.hf_config import text_config
from hybrid_jax.models.weights import apply_rules

FAMILIES: dict[str, ModuleType] = {
    model_type: module
    for module in (qwen3, qwen3_next, olmo_hybrid, lara_mini, gemma)
    for model_type in module.MODEL_TYPES
}


def family(model_type: str | None) -> ModuleType:
    """The module of a model family.

    Raises:
        ModelError: the model_type is not supported; the message lists those that are.
    """
    if model_type not in FAMILIES:
        raise ModelError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """A `ModelConfig` from the contents of config.json, multimodal wrappers included.

    Raises:
        ModelError: unsupported model_type, a missing field or a contradictory layer list.
    """
    try:
        text = text_config(config)
        module = family(text.get("model_type"))
        return module.config_from_hf(text)
    except ModelError:
        raise
    except KeyError as error:
        raise ModelError(f"config.json has no {error.args[0]!r}; add it") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(
            f"config.json has a value that does not fit: {error}; correct it"
        ) from error


def params_from_hub(config: ModelConfig, tensors: Mapping[str, jax.Array]) -> Params:
    """Parameters from hub tensors already in memory, keeping their dtype. Traceable.

    Raises:
        ModelError: missing, mis-shaped or unknown tensors, all in one message.
    """
    module = family(config.model_type)
    _, shapes, _ = abstract_params(config, "float32")
    rules = module.weight_rules(config, tensors)
    return apply_rules(rules, tensors.__getitem__, tensors, shapes, lambda _, array: array)
