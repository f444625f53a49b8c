"""Trains the bundled model within a wall-clock budget; interrupted runs continue where they were.

    python -m training.train --corpus DIR --tokenizer DIR --out DIR --minutes 39

SIGTERM ends it after the current step; the same command continues.
`OUT/log.jsonl` holds one JSON object a line; `OUT/checkpoint.safetensors` the newest state.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from training import corpus
from training.config import CONFIG, tensor_shapes
from training.curriculum import STAGES, next_stage
from training.data import ANSWER_WEIGHT, TEXT_WEIGHT, DataSource
from training.evaluate import Evaluator
from training.forward import Forward, Tensors, load_forward

WEIGHT_DECAY, CLIP_NORM = 0.05, 1.0
LEVELS = ((1, 100), (2, 100), (4, 200))  # of recall, watched during training
WARM_UP_STEPS, DECAY_FROM, FINAL_LR = 100, 0.6, 0.03


@dataclass
class State:
    """What a checkpoint restores; `elapsed` counts seconds of training over all runs."""

    tensors: Tensors
    optimiser: optax.OptState
    step: int = 0
    stage: int = 0
    tokens: int = 0
    elapsed: float = 0.0


def init_tensors(config: dict, seed: int) -> Tensors:
    """float32 tensors by hub name.

    Projections into a block keep the variance, those out of it start small. Decays start as in
    Mamba, with time constants of one to a thousand tokens: with those of `transformers` (one
    token) a state forgets every fact before training can use it. Linear layers start as lookup
    tables, see `start_as_lookup`.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if name.endswith("A_log"):
            value = np.log(rng.uniform(1, 8, shape))
        elif name.endswith("dt_bias"):
            step = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape))
            value = np.log(np.expm1(step))  # softplus gives `step` back
        elif name.endswith(("norm.weight", "layernorm.weight")):
            value = np.ones(shape)
        elif name.endswith("conv1d.weight"):
            bound = 1 / math.sqrt(shape[-1])
            value = rng.uniform(-bound, bound, shape)
        elif name.endswith("embed_tokens.weight"):
            value = rng.normal(0, 0.05, shape)
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
            value = rng.normal(0, config["initializer_range"], shape)
        else:
            value = rng.normal(0, shape[-1] ** -0.5, shape)
        tensors[name] = value
    start_as_lookup(tensors, config)
    return {name: jnp.asarray(value, jnp.float32) for name, value in tensors.items()}


def start_as_lookup(tensors: dict[str, np.ndarray], config: dict) -> None:
    """Make every linear layer store tokens under the token before them, and ask for the current.

    q and k get the same projection; the convolution leaves q and v in place and delays k by one
    token. So the state starts out as a table "what followed this token", the circuit that recall
    needs, which random weights take thousands of steps to find.
    """
    size = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    for name, value in tensors.items():
        if name.endswith("linear_attn.in_proj.weight"):
            value[size : 2 * size] = value[:size]
        if name.endswith(
            "conv1d.weight"
        ):  # [channels, 1, width], the last tap is the current token
            value *= 0.2
            value[:size, 0, -1] += 1
            value[size : 2 * size, 0, -2] += 1
            value[2 * size :, 0, -1] += 1


def make_optimiser() -> optax.GradientTransformation:
    """AdamW without its step size, which `learning_rate` gives each step."""
    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(
            WEIGHT_DECAY, mask=lambda t: jax.tree.map(lambda x: x.ndim > 1, t)
        ),
    )


def learning_rate(step: int, progress: float, peak: float) -> float:
    """Linear warm-up, a plateau, then a straight line down to `FINAL_LR` of the peak."""
    fall = max(0.0, progress - DECAY_FROM) / (1 - DECAY_FROM)
    return peak * min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - (1 - FINAL_LR) * min(1.0, fall))


def make_step(forward: Forward, optimiser: optax.GradientTransformation):
    """Compile one update; it returns the new tensors and optimiser state, then the figures."""

    def loss_of(tensors, tokens, targets, weights):
        logits = forward(tensors, tokens).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        answers = weights == ANSWER_WEIGHT
        figures = {
            "text_loss": losses.mean(where=weights == TEXT_WEIGHT),
            "answer_loss": losses.mean(where=answers),
            "answer_accuracy": (logits.argmax(-1) == targets).mean(where=answers),
        }
        return (losses * weights).sum() / weights.sum(), figures

    def step(tensors, state, tokens, targets, weights, lr):
        grad_of = jax.value_and_grad(loss_of, has_aux=True)
        (loss, figures), grads = grad_of(tensors, tokens, targets, weights)
        updates, state = optimiser.update(grads, state, tensors)
        tensors = jax.tree.map(lambda t, u: t - lr * u, tensors, updates)
        return tensors, state, figures | {"loss": loss, "norm": optax.global_norm(grads)}

    return jax.jit(step, donate_argnums=(0, 1))


def save(state: State, path: Path) -> None:
    """Write the checkpoint; a rename makes an interruption leave the old one whole."""
    arrays = {f"tensors/{name}": np.asarray(x) for name, x in state.tensors.items()}
    leaves = jax.tree.leaves(state.optimiser)
    arrays |= {f"optimiser/{i}": np.asarray(x) for i, x in enumerate(leaves)}
    partial = path.with_suffix(".partial")
    meta = {name: str(getattr(state, name)) for name in ("step", "stage", "tokens", "elapsed")}
    save_file(arrays, partial, meta)
    os.replace(partial, path)


def restore(path: Path, optimiser: optax.GradientTransformation) -> State:
    """Read what `save` wrote."""
    with safe_open(path, "np") as file:
        meta = file.metadata()
    arrays = {name: jnp.asarray(value) for name, value in load_file(path).items()}
    tensors = {k.removeprefix("tensors/"): v for k, v in arrays.items() if k.startswith("tensors/")}
    treedef = jax.tree.structure(optimiser.init(tensors))
    leaves = [arrays[f"optimiser/{i}"] for i in range(treedef.num_leaves)]
    state = jax.tree.unflatten(treedef, leaves)
    counts = (int(meta[name]) for name in ("step", "stage", "tokens"))
    return State(tensors, state, *counts, elapsed=float(meta["elapsed"]))


def log(path: Path, **values) -> None:
    """Append one line to the log file and print it."""
    line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()})
    print(line, flush=True)
    with path.open("a") as file:
        file.write(line + "\n")


def run(args: argparse.Namespace, source: DataSource, forward: Forward, judge: Evaluator) -> None:
    """Train until the budget is spent."""
    optimiser = make_optimiser()
    step_fn = make_step(forward, optimiser)
    checkpoint, log_file = args.out / "checkpoint.safetensors", args.out / "log.jsonl"
    if checkpoint.exists():
        state = restore(checkpoint, optimiser)
    else:
        tensors = init_tensors(CONFIG, args.seed)
        state = State(tensors, optimiser.init(tensors))
    began = time.monotonic() - state.elapsed
    saved = judged = state.elapsed
    recent: list[dict[str, float]] = []
    accuracies: list[float] = []
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    while not stopped and (progress := state.elapsed / (60 * args.minutes)) < 1:
        stage = STAGES[state.stage]
        batch = source.batch(state.step, stage)
        lr = learning_rate(state.step, progress, args.lr)
        state.tensors, state.optimiser, figures = step_fn(
            state.tensors, state.optimiser, batch.tokens, batch.targets, batch.weights, lr
        )
        recent.append({name: float(value) for name, value in figures.items()})
        accuracies.append(recent[-1]["answer_accuracy"])
        state.step += 1
        state.tokens += stage.rows * stage.length
        state.elapsed = time.monotonic() - began
        clock = {"step": state.step, "tokens": state.tokens, "seconds": state.elapsed}
        if state.step % args.log_every == 0:
            # nanmean: a batch may hold no text, or no answer at all.
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
                means = {k: float(np.nanmean([r[k] for r in recent])) for k in recent[0]}
            log(log_file, **clock, stage=state.stage, **means, lr=lr)
            recent.clear()
        if (following := next_stage(state.stage, accuracies)) != state.stage:
            state.stage = following
            accuracies.clear()
            log(log_file, **clock, entered_stage=following)
        if state.elapsed - judged > 60 * args.evaluate_minutes:
            log(log_file, **clock, **judge.report(state.tensors, count=32, max_batches=1))
            judged = state.elapsed
        if state.elapsed - saved > 60 * args.save_minutes:
            save(state, checkpoint)
            saved = state.elapsed
    save(state, checkpoint)
    if stopped:
        return
    clock = {"step": state.step, "tokens": state.tokens, "seconds": state.elapsed}
    log(log_file, **clock, **judge.report(state.tensors, count=128))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="directory of corpus.json")
    parser.add_argument("--tokenizer", type=Path, required=True, help="of tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--forward", default="training.forward:make_forward")
    parser.add_argument("--minutes", type=float, default=39, help="budget over all resumed runs")
    parser.add_argument("--evaluate-minutes", type=float, default=12)
    parser.add_argument("--save-minutes", type=float, default=2)
    parser.add_argument("--log-every", type=int, default=25)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chapters, held_out = corpus.load(args.corpus)
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    forward = load_forward(args.forward, CONFIG)
    source = DataSource(tokenizer, chapters, args.seed)
    run(args, source, forward, Evaluator(forward, tokenizer, held_out, LEVELS))


if __name__ == "__main__":
    main()
