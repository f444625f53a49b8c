"""Compares an exported directory under Hugging Face transformers with the library, and shows it.

    python -m training.check hybrid_jax/bundled/NAME

Needs torch and a transformers release that has Lara Mini.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_jax.generate import dense_logits, generate
from hybrid_jax.loading import load_model
from training import recall

TEXT = "And it came to pass in those days, that the LORD spake unto"
PROMPTS = (TEXT, "In the beginning", "Then Jesus said unto them,")
TOLERANCE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.path)
    theirs = AutoModelForCausalLM.from_pretrained(args.path, dtype=torch.float32).eval()
    ours = load_model(args.path, dtype="float32")
    prompt, answer = recall.make_prompt(random.Random(7), 3, 120)
    for text in (TEXT, prompt + answer):
        ids = tokenizer(text).input_ids
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits[0].numpy()
        difference = np.abs(dense_logits(ours, ids) - expected).max()
        print(f"{len(ids)} tokens, largest difference of logits {difference:.1e}")
        if difference > TOLERANCE:
            raise SystemExit(f"more than {TOLERANCE}")
    ids = tokenizer(prompt).input_ids
    print(f"asked for{answer}, got{tokenizer.decode(generate(ours, ids, 5))}")
    for text in PROMPTS:
        ids = tokenizer(text).input_ids
        print("---", text + tokenizer.decode(generate(ours, ids, 60, stop_ids=ours.stop_ids)))


if __name__ == "__main__":
    main()
