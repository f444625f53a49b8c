"""How a checkpoint's tensors become parameters: rules to hold against the hub names."""

import fnmatch
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_jax.config import ModelConfig
from hybrid_jax.errors import ModelError
from hybrid_jax.specs import AttentionSpec, GatedDeltaSpec, LayerSpec, MoESpec

Array = Any  # numpy or jax: rules use the array's own namespace, so that they trace as well


@dataclass(frozen=True)
class Rule:
    """One parameter: its path, the hub tensors it is made of, and how."""

    target: str
    sources: tuple[str, ...]
    convert: Callable[..., Array] = lambda array: array


def concat(*arrays: Array) -> Array:
    """Joins along the first axis."""
    return arrays[0].__array_namespace__().concat(arrays, axis=0)


def stack(*arrays: Array) -> Array:
    """Joins along a new first axis."""
    return arrays[0].__array_namespace__().stack(arrays, axis=0)


def stack_gate_up(*arrays: Array) -> Array:
    """Per-expert gates, then per-expert ups, each [F, D] -> [E, 2F, D], gate rows first."""
    experts = len(arrays) // 2
    xp = arrays[0].__array_namespace__()
    pairs = zip(arrays[:experts], arrays[experts:], strict=True)
    return xp.stack([xp.concat(pair, axis=0) for pair in pairs], axis=0)


def squeeze_conv(*arrays: Array) -> Array:
    """Depthwise convolution weights [C, 1, W], joined over channels -> [C, W]."""
    return concat(*(array[:, 0, :] for array in arrays))


def rows(start: int, stop: int) -> Callable[[Array], Array]:
    """Takes rows [start, stop) of a fused projection."""
    return lambda array: array[start:stop]


def linear_rules(target: str, source: str, bias: bool = False) -> list[Rule]:
    """A projection with the same name on both sides but for the path before it."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return [Rule(f"{target}.{kind}", (f"{source}.{kind}",)) for kind in kinds]


def attention(layer: LayerSpec) -> AttentionSpec:
    """The mixer of a layer of a family that has nothing but attention."""
    assert isinstance(layer.mixer, AttentionSpec)
    return layer.mixer


def attention_rules(i: int, spec: AttentionSpec) -> list[Rule]:
    """q/k/v/o projections and q/k norms under `self_attn`."""
    target, source = f"layers.{i}.mixer", f"model.layers.{i}.self_attn"
    rules = []
    for name in ("q_proj", "k_proj", "v_proj"):
        rules += linear_rules(f"{target}.{name}", f"{source}.{name}", spec.qkv_bias)
    rules += linear_rules(f"{target}.o_proj", f"{source}.o_proj", spec.out_bias)
    if spec.qk_norm is not None:
        rules += linear_rules(f"{target}.q_norm", f"{source}.q_norm")
        rules += linear_rules(f"{target}.k_norm", f"{source}.k_norm")
    return rules


def gated_delta_rules(i: int, norm: str = "norm") -> list[Rule]:
    """What all gated-delta families share: convolution, gates' parameters, norm, output."""
    target, source = f"layers.{i}.mixer", f"model.layers.{i}.linear_attn"
    return [
        Rule(f"{target}.conv_weight", (f"{source}.conv1d.weight",), squeeze_conv),
        Rule(f"{target}.A_log", (f"{source}.A_log",)),
        Rule(f"{target}.dt_bias", (f"{source}.dt_bias",)),
        Rule(f"{target}.norm_weight", (f"{source}.{norm}.weight",)),
        Rule(f"{target}.out_proj.weight", (f"{source}.out_proj.weight",)),
    ]


def mlp_rules(i: int) -> list[Rule]:
    """gate, up and down under `mlp`."""
    return [
        rule
        for name in ("gate_proj", "up_proj", "down_proj")
        for rule in linear_rules(f"layers.{i}.ffn.{name}", f"model.layers.{i}.mlp.{name}")
    ]


def moe_rules(i: int, spec: MoESpec, names: Collection[str]) -> list[Rule]:
    """Router, experts (stacked on disk, or one tensor each) and the shared expert."""
    target, source = f"layers.{i}.ffn", f"model.layers.{i}.mlp"
    rules = [Rule(f"{target}.router.weight", (f"{source}.gate.weight",))]
    if f"{source}.experts.gate_up_proj" in names:
        rules += [
            Rule(f"{target}.gate_up", (f"{source}.experts.gate_up_proj",)),
            Rule(f"{target}.down", (f"{source}.experts.down_proj",)),
        ]
    else:
        each = lambda name: tuple(  # noqa: E731
            f"{source}.experts.{e}.{name}.weight" for e in range(spec.num_experts)
        )
        rules += [
            Rule(f"{target}.gate_up", each("gate_proj") + each("up_proj"), stack_gate_up),
            Rule(f"{target}.down", each("down_proj"), stack),
        ]
    if spec.shared_intermediate_size:
        for name in ("gate_proj", "up_proj", "down_proj"):
            rules += linear_rules(
                f"{target}.shared_expert.{name}", f"{source}.shared_expert.{name}"
            )
    if spec.shared_gate:
        rules += linear_rules(f"{target}.shared_gate", f"{source}.shared_expert_gate")
    return rules


def ffn_rules(i: int, layer: LayerSpec, names: Collection[str]) -> list[Rule]:
    """Rules of the layer's feed-forward half, dense or sparse."""
    if isinstance(layer.ffn, MoESpec):
        return moe_rules(i, layer.ffn, names)
    return mlp_rules(i)


def norm_rules(i: int, norms: Mapping[str, str]) -> list[Rule]:
    """`norms` maps our norm names to the hub's, within layer i."""
    return [
        Rule(f"layers.{i}.{ours}.weight", (f"model.layers.{i}.{hub}.weight",))
        for ours, hub in norms.items()
    ]


PRE_NORMS = {"pre_mixer_norm": "input_layernorm", "pre_ffn_norm": "post_attention_layernorm"}


def outer_rules(config: ModelConfig) -> list[Rule]:
    """Embedding, final norm and head."""
    rules = [
        Rule("embed_tokens.weight", ("model.embed_tokens.weight",)),
        Rule("norm.weight", ("model.norm.weight",)),
    ]
    if not config.tie_word_embeddings:
        rules.append(Rule("lm_head.weight", ("lm_head.weight",)))
    return rules


def check_layer_map(config: ModelConfig, names: Collection[str]) -> None:
    """Holds the layer map against the checkpoint: a linear layer has linear weights.

    Raises:
        ModelError: naming every layer whose kind contradicts its tensors.
    """
    found: dict[int, set[str]] = {}
    for name in names:
        parts = name.split(".")
        if parts[:2] == ["model", "layers"] and len(parts) > 3:
            found.setdefault(int(parts[2]), set()).add(parts[3])
    wrong = []
    for i, layer in enumerate(config.layers):
        linear = isinstance(layer.mixer, GatedDeltaSpec)
        other = "self_attn" if linear else "linear_attn"
        if other in found.get(i, ()):
            kind = "linear attention" if linear else f"{layer.kind} attention"
            wrong.append(f"layer {i} is {kind} by config.json but has {other}.* tensors")
    if wrong:
        raise ModelError(
            "the layer map contradicts the checkpoint: "
            + "; ".join(wrong)
            + "; correct layer_types in config.json"
        )


def apply_rules(
    rules: list[Rule],
    get: Callable[[str], Array],
    names: Collection[str],
    shapes: Mapping[str, Any],
    put: Callable[[str, Array], Array],
    ignored: tuple[str, ...] = (),
) -> dict[str, Array]:
    """Makes every parameter, one at a time.

    Args:
        rules: one per parameter.
        get: reads a hub tensor (lazily, from the memory map).
        names: the hub tensors there are.
        shapes: parameter path -> object with `.shape`.
        put: places a finished parameter on its device(s) in its dtype.
        ignored: patterns of tensors that may be there but are not used.

    Raises:
        ModelError: one error for all missing, mis-shaped and unknown tensors together.
    """
    problems, params, used = [], {}, set()
    for rule in rules:
        used.update(rule.sources)
        missing = [name for name in rule.sources if name not in names]
        if missing:
            problems.append(f"missing {missing[0]}" + _more(missing))
            continue
        wanted = tuple(shapes[rule.target].shape)
        try:
            array = rule.convert(*(get(name) for name in rule.sources))
        except (ValueError, IndexError, TypeError) as error:
            problems.append(f"cannot make {rule.target} from {rule.sources[0]}: {error}")
            continue
        if tuple(array.shape) != wanted:
            problems.append(f"{rule.sources[0]} gives shape {tuple(array.shape)}, not {wanted}")
        elif not problems:
            params[rule.target] = put(rule.target, array)
    unknown = [
        name
        for name in sorted(set(names) - used)
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)
    ]
    problems += [f"unknown {name}" for name in unknown]
    problems += [f"no rule makes {path}" for path in set(shapes) - {r.target for r in rules}]
    if problems:
        shown = "; ".join(problems[:20])
        rest = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ModelError(f"the checkpoint does not fit its config.json: {shown}{rest}")
    return params


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more like it" if len(names) > 1 else ""
