"""Measures the ranges of K and V on text, for caches in int8 or in float8 with scales."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from hybrid_jax.llm import LLM
from hybrid_jax.loading.kv_ranges import write_ranges
from hybrid_jax.prompts import TokenIds, prompt_list
from hybrid_jax.sampling_params import SamplingParams
from pallas_kernels.storage import LARGEST


def calibrate_kv(
    llm: LLM, prompts: str | TokenIds | Sequence[str] | Sequence[TokenIds], path: str | Path
) -> None:
    """Writes the largest |K| and |V| of every KV head that `prompts` lead to.

    `LLM(model, kv_dtype="int8", kv_ranges=path)` then rounds K and V to 1/127 of them, and takes
    what is beyond for the largest. So the prompts should look like those to come: some thousand
    tokens in all. Of layers with a window only the end of each prompt counts.

    Args:
        llm: the model, with K and V in float32 or bfloat16.
        prompts: one or several, as text or as token ids.
        path: of the JSON file to write.

    Raises:
        ValueError: the K and V of `llm` are of bytes themselves, there is no prompt, or there is no
            folder for the file.
        InvalidRequest: a prompt can never be served.
    """
    ranges: dict[str, dict[str, np.ndarray]] = {}
    target, texts = Path(path), prompt_list(prompts)
    if not texts:
        raise ValueError("there is no prompt to measure K and V on; give text like that to come")
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(f"{str(path)!r} cannot be written; give a file in a folder that exists")
    for prompt in texts:
        with closing(llm.session()) as session:
            session.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
            snapshot = session.snapshot()
        for name, pages in snapshot.arrays.items():
            layer, field = name.split(".")
            if field != "pages":
                continue
            if pages.dtype in LARGEST:
                raise ValueError(
                    f"K and V are {pages.dtype} here; calibrate with an LLM of kv_dtype auto"
                )
            size = snapshot.page_size
            first = -(-snapshot.length // size) - len(pages)  # logical page; 0 without a window
            tokens = pages.reshape(-1, *pages.shape[2:])[: snapshot.length - first * size]
            highest = np.abs(tokens.astype(np.float32)).max(axis=(0, 2))
            known = ranges.setdefault(layer, {which: np.zeros(0) for which in "kv"})
            for which, values in zip("kv", (highest[0::2], highest[1::2]), strict=True):
                known[which] = np.maximum(values, known[which]) if known[which].size else values
    written = {
        # A head that is always 0 may have any range.
        layer: {which: np.where(v == 0, 1.0, v).tolist() for which, v in pair.items()}
        for layer, pair in ranges.items()
    }
    write_ranges(target, written)
