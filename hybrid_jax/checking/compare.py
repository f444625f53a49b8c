"""Against a reference: hidden states layer by layer, prefill logits and greedy tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_jax.checking.findings import Finding, coarser, tie_margin, tolerance, verdict
from hybrid_jax.checking.reference import RecordedPrompt, Reference
from hybrid_jax.config import ModelConfig
from hybrid_jax.decoding import Workspace
from hybrid_jax.errors import ReferenceFileError
from hybrid_jax.inspection import describe_layer
from hybrid_jax.specs import GatedDeltaSpec, LayerSpec, MoESpec

# Fields of config.json that change no number.
_IDLE = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


@dataclass(frozen=True)
class LayerError:
    """How far the hidden states after `layer` layers (0: the embeddings) are from the reference."""

    layer: int
    error: float  # norm of the difference over the norm, of the worst prompt
    bound: float
    position: int | None  # the first one beyond the bound, of that prompt


def compare(
    space: Workspace, reference: Reference
) -> tuple[tuple[Finding, ...], tuple[LayerError, ...]]:
    """Feeds the recorded prompts, then the recorded tokens one by one.

    Every greedy token is compared, since what is fed is the reference's text whatever ours would
    have been.

    Raises:
        ReferenceFileError: the reference is of a model of another shape.
    """
    model = space.model_config
    _check_fits(model, reference)
    dtype = coarser(space.model.dtype, reference.dtype)
    errors, logit_errors, gaps = [], [], []
    for recorded in reference.prompts:
        with space.session() as session:
            hidden = session.hidden_states(recorded.prompt.tolist(), range(len(model.layers) + 1))
            errors.append(_relative(hidden[:, recorded.positions], recorded.hidden))
            logits, std = session.next_logits, recorded.logits.std()
            logit_errors.append(float(np.sqrt(np.mean((logits - recorded.logits) ** 2)) / std))
            for token in recorded.tokens.tolist():
                gaps.append(float((logits.max() - logits[token]) / logits.std()))
                logits = session.decode(token)
    layers = _layer_errors(model, reference.prompts, errors, dtype)
    depth = len(model.layers)
    findings = (
        _hidden_finding(model, layers),
        _logits_finding(max_or_nan(logit_errors), tolerance(dtype, depth), layers),
        tokens_finding("greedy tokens", gaps, tie_margin(dtype, depth)),
    )
    return findings, layers


def compare_configs(source: Path, reference: Reference) -> Finding:
    """Which fields of config.json are not those of the model that was recorded."""
    path = source / "config.json"
    here = json.loads(path.read_text()) if path.is_file() else reference.config
    names = sorted(
        name
        for name in {*here, *reference.config} - _IDLE
        if here.get(name) != reference.config.get(name)
    )
    detail = "the fields of config.json are those recorded"
    if names:
        changes = [_change(name, reference.config, here) for name in names]
        detail = f"config.json is not the one recorded: {'; '.join(changes)}"
    return Finding("configuration", "warn" if names else "pass", len(names), 0, detail)


def tokens_finding(
    check: str,
    gaps: Sequence[float],
    margin: float,
    *,
    logprob_errors: Sequence[float] = (),
    more: str = "",
) -> Finding:
    """What the gaps say: by how many deviations each token's logit lies below the largest.

    `logprob_errors`, in the same unit, may be as large: both logit and normaliser may move.
    """
    worst = max_or_nan([*gaps, *logprob_errors])
    ties = sum(0 < gap <= margin for gap in gaps)
    wrong = sum(not gap <= margin for gap in gaps)
    detail = f"{len(gaps) - wrong} of {len(gaps)} tokens are the most likely ones{more}"
    if ties:
        detail += f", {ties} of them by a tie within rounding"
    if not max_or_nan([0.0, *logprob_errors]) <= margin:
        detail += "; log probabilities differ"
    return Finding(check, verdict(worst, margin), worst, margin, detail)


def max_or_nan(values: Sequence[float]) -> float:
    """The largest value; NaN if one is, which Python's `max` may lose."""
    return float(np.max(values))


def _change(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    old, new = json.dumps(before.get(name)), json.dumps(after.get(name))
    return f"{name} {old} -> {new}" if len(old + new) < 60 else name


def _check_fits(model: ModelConfig, reference: Reference) -> None:
    for recorded in reference.prompts:
        found = (recorded.hidden.shape[0] - 1, recorded.hidden.shape[2], recorded.logits.shape[0])
        here = (len(model.layers), model.hidden_size, model.vocab_size)
        if found != here:
            raise ReferenceFileError(
                "the reference is of a model with {} layers, hidden size {} and {} words; this one "
                "has {}, {} and {}: record its own".format(*found, *here)
            )


def _relative(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """f64[L + 1, P]: norm of the difference over the norm, per layer and position."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    norms = np.linalg.norm(expected, axis=-1)
    return np.linalg.norm(found - expected, axis=-1) / np.maximum(norms, np.finfo(np.float32).tiny)


def _layer_errors(
    model: ModelConfig, prompts: tuple[RecordedPrompt, ...], errors: list[np.ndarray], dtype: str
) -> tuple[LayerError, ...]:
    """Over all prompts, `errors` [L + 1, P] each.

    The worst position counts. Not so with experts, whose choice is discrete: where two are equally
    good, rounding sends a token to the other one, and this token says nothing. There it is the
    median; half of the positions are at the end of the prompt, past the window of a long one.
    """
    sparse = any(isinstance(layer.ffn, MoESpec) for layer in model.layers)
    of_prompt = np.median if sparse else np.max
    found = []
    for n in range(len(model.layers) + 1):
        per_prompt = np.array([of_prompt(error[n]) for error in errors])
        worst, bound = int(np.argmax(per_prompt)), tolerance(dtype, n)  # the first NaN, if any
        beyond = np.flatnonzero(~(errors[worst][n] <= bound))
        failed = not per_prompt[worst] <= bound
        position = int(prompts[worst].positions[beyond[0]]) if failed else None
        found.append(LayerError(n, float(per_prompt[worst]), bound, position))
    return tuple(found)


def _hidden_finding(model: ModelConfig, layers: tuple[LayerError, ...]) -> Finding:
    first = next((layer for layer in layers if layer.position is not None), None)
    if first is None:
        worst = max(layers, key=lambda layer: layer.error / layer.bound)
        detail = f"all {len(layers) - 1} layers agree; the farthest is {_name(model, worst.layer)}"
        return Finding("hidden states", "pass", worst.error, worst.bound, detail)
    detail = f"{_name(model, first.layer)} is the first to diverge, {_suspects(model, first)}"
    return Finding("hidden states", "fail", first.error, first.bound, detail)


def _name(model: ModelConfig, num_layers: int) -> str:
    if num_layers == 0:
        return "the embedding"
    kind, mixer, ffn = describe_layer(model.layers[num_layers - 1])
    return f"layer {num_layers - 1} ({kind}: {mixer}; {ffn})"


def _suspects(model: ModelConfig, first: LayerError) -> str:
    """Where it begins tells what to look at."""
    if first.layer == 0:
        return "so look at the embedding's weights and its scale"
    spec: LayerSpec = model.layers[first.layer - 1]
    if first.position == 0:
        return "from position 0 on, where there is no past: look at weights, norms, feed-forward"
    where = f"from position {first.position} on"
    if isinstance(spec.mixer, GatedDeltaSpec):
        return f"{where} and not at the beginning: look at convolution, decay and state"
    if spec.mixer.window is not None and (first.position or 0) >= spec.mixer.window - 1:
        return f"{where}, where the window of {spec.mixer.window} is full: look at its width"
    return f"{where} and not at the beginning: look at rope, scale, q/k norms and the mask"


def _logits_finding(error: float, bound: float, layers: tuple[LayerError, ...]) -> Finding:
    detail = "difference after the last token of a prompt, in deviations of the logits"
    if not error <= bound and all(layer.position is None for layer in layers):
        detail += "; no layer diverges, so look at the final norm, the head and its soft cap"
    return Finding("prefill logits", verdict(error, bound), error, bound, detail)
