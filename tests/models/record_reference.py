"""Runs transformers on the tiny checkpoints, for committed references and for the live test.

    python -m tests.models.record_reference [NAME ...]

writes `tests/models/reference/<name>.npz` for every checkpoint of `tests/helpers/tiny.py` (or those
named). It needs torch (CPU) and transformers 5.24 or later; reading the files needs neither.

Each file holds the weight seed and, for prompt i: `prompt_i`, the greedy continuation `tokens_i`,
prefill logits `logits_i` at `positions_i`, and `norms_i` [layers + 1, tokens], the norm of the
hidden state before each layer and after the final norm: they tell which layer a difference starts
in.
"""

import itertools
import logging
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel

from tests.helpers import tiny

REFERENCE = Path(__file__).parent / "reference"
PROMPT_LENGTHS = (5, 23, 65)  # 65: one more than the chunk of the linear layers
NEW_TOKENS = 64
# A greedy step or an expert choice this close to a tie may go the other way in other arithmetic of
# the same precision, and a model whose logits differ between prefill and cached decode by this
# share of their standard deviation amplifies rounding. Such a seed says nothing about an
# implementation: the next one is taken.
MIN_TOKEN_MARGIN = 1e-3
MIN_ROUTER_MARGIN = 1e-4
MAX_NOISE = 1e-4


@dataclass(frozen=True)
class Run:
    """What transformers makes of one prompt."""

    prompt: np.ndarray  # i32[T]
    logits: np.ndarray  # f32[T, V]
    norms: np.ndarray  # f32[L + 1, T]
    tokens: np.ndarray  # i32[NEW_TOKENS]
    token_margin: float
    router_margin: float
    noise: float

    @property
    def decisive(self) -> bool:
        """No choice of a token or of an expert was close to a tie, and rounding stays small."""
        return (
            self.token_margin > MIN_TOKEN_MARGIN
            and self.router_margin > MIN_ROUTER_MARGIN
            and self.noise < MAX_NOISE
        )


def prompts(seed: int) -> list[np.ndarray]:
    """One prompt per length, of random ids."""
    raw = np.random.Philox(key=[seed, 0]).random_raw(sum(PROMPT_LENGTHS))
    ids = (raw % np.uint64(tiny.VOCAB_SIZE)).astype(np.int32)
    return np.split(ids, np.cumsum(PROMPT_LENGTHS)[:-1])


def run(directory: Path, seed: int) -> Iterator[Run]:
    """Loads a checkpoint in float32 and runs the prompts of `seed` through it, shortest first."""
    torch.set_num_threads(1)  # products this small take ten times as long on two threads
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    wrong = {key: names for key, names in report.items() if names}
    if wrong:  # the names and shapes of tests/helpers/tiny_weights.py are not those of the hub
        raise ValueError(f"transformers does not accept the tensors of {directory}: {wrong}")
    model.eval()
    if model.config.model_type.startswith("gemma2"):
        model.set_attn_implementation("eager")  # the only one that caps attention scores
    for prompt in prompts(seed):
        yield _run(model, prompt)


def decisive_run(name: str, directory: Path, first_seed: int) -> tuple[int, list[Run]]:
    """Writes and runs the checkpoint of the first decisive seed from `first_seed` on."""
    for seed in itertools.count(first_seed):
        tiny.write_checkpoint(name, directory, seed)
        runs = list(itertools.takewhile(lambda r: r.decisive, run(directory, seed)))
        if len(runs) == len(PROMPT_LENGTHS):
            return seed, runs
    raise AssertionError("unreachable")


class _Forced(LogitsProcessor):
    """Makes `generate` decode the prompt itself, token by token, before it goes on freely."""

    def __init__(self, prompt: np.ndarray) -> None:
        self.prompt = prompt.tolist()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = input_ids.shape[1]
        if position >= len(self.prompt):
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.prompt[position]] = 0
        return forced


def _run(model: PreTrainedModel, prompt: np.ndarray) -> Run:
    margins: list[float] = []
    hooks = [
        module.register_forward_hook(
            lambda module, _, out: margins.append(_margin(out[0], module.top_k))
        )
        for module in model.modules()
        if type(module).__name__.endswith("TopKRouter")
    ]
    first = torch.tensor([[prompt[0]]])
    with torch.no_grad():
        greedy = model.generate(
            first,
            attention_mask=torch.ones_like(first),
            max_new_tokens=len(prompt) - 1 + NEW_TOKENS,
            do_sample=False,
            logits_processor=[_Forced(prompt)],
            output_logits=True,
            return_dict_in_generate=True,
        )
        # All at once, in the parallel forms of the mixers: what the references are made of.
        whole = model(greedy.sequences[:, :-1], output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    decoded, logits = torch.cat(greedy.logits), whole.logits[0]
    norms = torch.stack([hidden[0].norm(dim=-1) for hidden in whole.hidden_states])
    return Run(
        prompt=prompt,
        logits=logits[: len(prompt)].numpy(),
        norms=norms[:, : len(prompt)].numpy(),
        tokens=greedy.sequences[0, len(prompt) :].numpy().astype(np.int32),
        token_margin=_margin(decoded[len(prompt) - 1 :], 1),
        router_margin=min(margins, default=float("inf")),
        noise=float((decoded - logits).abs().max() / logits.std()),
    )


def _margin(scores: torch.Tensor, k: int) -> float:
    """Smallest gap over all rows between the k-th and the next score."""
    top = scores.reshape(-1, scores.shape[-1]).topk(k + 1, dim=-1).values
    return float((top[:, k - 1] - top[:, k]).min())


def _save(name: str, seed: int, runs: list[Run]) -> None:
    arrays: dict[str, np.ndarray] = {"seed": np.int64(seed)}
    for i, result in enumerate(runs):
        # The long prompt's logits at every fourth position and at the last keep the files small.
        step = 1 if len(result.prompt) < 32 else 4
        positions = np.unique([*range(0, len(result.prompt), step), len(result.prompt) - 1])
        arrays |= {
            f"prompt_{i}": result.prompt,
            f"tokens_{i}": result.tokens,
            f"positions_{i}": positions.astype(np.int32),
            f"logits_{i}": result.logits[positions],
            f"norms_{i}": result.norms,
        }
    REFERENCE.mkdir(exist_ok=True)
    np.savez_compressed(REFERENCE / f"{name}.npz", **arrays)


def main(names: list[str]) -> None:
    """Records the references of the checkpoints named, or of all."""
    for name in names or tiny.TINY:
        with tempfile.TemporaryDirectory() as directory:
            seed, runs = decisive_run(name, Path(directory), first_seed=0)
        _save(name, seed, runs)
        distinct = [len(set(r.tokens.tolist())) for r in runs]
        std = float(np.std(np.concatenate([r.logits for r in runs])))
        logging.info("%s: seed %d, logit std %.2f, distinct tokens %s", name, seed, std, distinct)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(sys.argv[1:])
