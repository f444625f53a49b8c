"""Greedy decoding with hybrid_jax through its public API, driven over standard input.

``generate`` returns when all tokens are there, so the two phases are told apart by two calls on
different prompts of one length (a prefix cache must not help the second): one new token gives
the prefill time, and what the full call needs beyond it is the decode time.
"""

import platform
import time

import jax
import protocol

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.llm import RequestOutput


class HybridJaxEngine:
    """The engine behind ``LLM.generate``."""

    def __init__(self, model: str, dtype: str, max_batch: int, max_len: int):
        self.dtype = dtype
        self.llm = LLM(model, dtype=dtype, max_num_seqs=max_batch, max_model_len=max_len)

    def describe(self) -> dict[str, object]:
        """Versions and settings."""
        return {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "dtype": self.dtype,
        }

    def _generate(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        return [_token_ids(output) for output in outputs], elapsed

    def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
        """Times one call for the first token and one for all of them."""
        probes = [prompt[:1] + prompt[:0:-1] for prompt in prompts]
        _, prefill = self._generate(probes, 1)
        tokens, total = self._generate(prompts, max_tokens)
        return {"tokens": tokens, "prefill_s": prefill, "decode_s": total - prefill}


def _token_ids(output: RequestOutput) -> list[int]:
    """The tokens of the only completion of one prompt."""
    completion = output.outputs[0]
    if completion.finish_reason != "length":
        raise RuntimeError(f"ended early: {completion.finish_reason}") from completion.error
    return completion.token_ids


def main() -> None:
    """Loads the model and serves requests."""
    channel = protocol.claim_stdout()
    args = protocol.parser(__doc__ or "").parse_args()
    engine = HybridJaxEngine(args.model, args.dtype, args.max_batch, args.max_len)
    protocol.serve(engine, channel)


if __name__ == "__main__":
    main()
