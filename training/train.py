"""Trains the bundled model within a wall-clock budget; interrupted runs continue where they were.

    python -m training.train --corpus DIR --tokenizer DIR --out DIR --minutes 60

`OUT/log.jsonl` holds one JSON object a line; `OUT/checkpoint.safetensors` the newest state.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
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
from training.data import ANSWER_WEIGHT, TEXT_WEIGHT, DataSource
from training.evaluate import Evaluator
from training.forward import Forward, Tensors, load_forward

WEIGHT_DECAY, CLIP_NORM, WARM_UP, FINAL_LR = 0.05, 1.0, 0.02, 0.02
# (from this progress on, rows, row length): many small steps first, they teach copying sooner.
STAGES = ((0.0, 8, 128), (0.25, 8, 256), (0.6, 4, 512))


@dataclass
class State:
    """What a checkpoint restores; `elapsed` counts seconds of training over all runs."""

    tensors: Tensors
    optimiser: optax.OptState
    step: int = 0
    elapsed: float = 0.0


def init_tensors(config: dict, seed: int) -> Tensors:
    """float32 tensors by hub name, initialised as `transformers` does."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if name.endswith("A_log"):
            value = np.log(rng.uniform(1, 16, shape))
        elif name.endswith(("norm.weight", "layernorm.weight", "dt_bias")):
            value = np.ones(shape)
        elif name.endswith("conv1d.weight"):
            bound = 1 / math.sqrt(shape[-1])  # torch's own: `transformers` leaves it alone
            value = rng.uniform(-bound, bound, shape)
        else:
            value = rng.normal(0, config["initializer_range"], shape)
        tensors[name] = jnp.asarray(value, jnp.float32)
    return tensors


def make_optimiser() -> optax.GradientTransformation:
    """AdamW without its step size, which `learning_rate` gives each step."""
    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(
            WEIGHT_DECAY, mask=lambda t: jax.tree.map(lambda x: x.ndim > 1, t)
        ),
    )


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine down to `FINAL_LR` of the peak."""
    if progress < WARM_UP:
        return peak * (progress + 1e-3) / WARM_UP
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARM_UP) / (1 - WARM_UP))))
    return peak * (FINAL_LR + (1 - FINAL_LR) * cosine)


def make_step(forward: Forward, optimiser: optax.GradientTransformation):
    """Compile one update; it returns the new tensors and optimiser state, then the figures."""

    def loss_of(tensors, tokens, targets, weights):
        logits = forward(tensors, tokens).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        answers = weights == ANSWER_WEIGHT
        figures = {
            "text_loss": losses.mean(where=weights == TEXT_WEIGHT),
            "answer_loss": losses.mean(where=answers),
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
    save_file(arrays, partial, {"step": str(state.step), "elapsed": str(state.elapsed)})
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
    return State(tensors, state, int(meta["step"]), float(meta["elapsed"]))


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
    while (progress := state.elapsed / (60 * args.minutes)) < 1:
        _, rows, length = max(stage for stage in STAGES if progress >= stage[0])
        batch = source.batch(state.step, progress, rows, length)
        lr = learning_rate(progress, args.lr)
        state.tensors, state.optimiser, figures = step_fn(
            state.tensors, state.optimiser, batch.tokens, batch.targets, batch.weights, lr
        )
        recent.append({name: float(value) for name, value in figures.items()})
        state.step += 1
        state.elapsed = time.monotonic() - began
        clock = {"step": state.step, "seconds": state.elapsed}
        if state.step % args.log_every == 0:
            # nanmean: a batch may hold no answer at all.
            means = {k: float(np.nanmean([r[k] for r in recent])) for k in recent[0]}
            log(log_file, **clock, **means, lr=lr)
            recent.clear()
        if state.elapsed - judged > 60 * args.evaluate_minutes:
            log(log_file, **clock, **judge.report(state.tensors, count=32, max_batches=1))
            judged = state.elapsed
        if state.elapsed - saved > 60 * args.save_minutes:
            save(state, checkpoint)
            saved = state.elapsed
    save(state, checkpoint)
    log(log_file, step=state.step, seconds=state.elapsed, **judge.report(state.tensors, count=128))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="directory of corpus.json")
    parser.add_argument("--tokenizer", type=Path, required=True, help="of tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--forward", default="training.forward:make_forward")
    parser.add_argument("--minutes", type=float, default=60, help="budget over all resumed runs")
    parser.add_argument("--evaluate-minutes", type=float, default=4)
    parser.add_argument("--save-minutes", type=float, default=3)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chapters, held_out = corpus.load(args.corpus)
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    forward = load_forward(args.forward, CONFIG)
    source = DataSource(tokenizer, chapters, args.seed)
    run(args, source, forward, Evaluator(forward, tokenizer, held_out))


if __name__ == "__main__":
    main()
