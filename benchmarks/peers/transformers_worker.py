"""Greedy decoding with Hugging Face transformers on the CPU, driven over standard input.

The loop calls the model directly instead of ``generate``: it spares the peer the overhead of
``generate`` and gives the moment of the first token.
"""

import platform
import time

import protocol
import torch
import transformers


class TransformersEngine:
    """A causal model with its dynamic cache; ``compile_model`` uses a static cache instead."""

    def __init__(self, model: str, dtype: str, threads: int, compile_model: bool):
        torch.set_num_threads(threads)
        self.threads = threads
        self.dtype = dtype
        self.compiled = compile_model
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self.step = torch.compile(self.model) if compile_model else self.model

    def describe(self) -> dict[str, object]:
        """Versions and settings."""
        return {
            "python": platform.python_version(),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": self.dtype,
            "threads": self.threads,
            "attention": "sdpa",
            "torch.compile": self.compiled,
        }

    def _cache(self, length: int) -> transformers.Cache:
        if self.compiled:
            return transformers.StaticCache(config=self.model.config, max_cache_len=length)
        return transformers.DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
        """Prefills all prompts in one call, then decodes one token per sequence and step."""
        length = len(prompts[0])
        cache = self._cache(length + max_tokens)
        start = time.perf_counter()
        logits = self.model(
            torch.tensor(prompts), past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        steps = [token.tolist()]
        first = time.perf_counter()
        for position in range(length, length + max_tokens - 1):
            where = torch.full_like(token, position)
            logits = self.step(
                token, past_key_values=cache, use_cache=True, position_ids=where
            ).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
            steps.append(token.tolist())
        last = time.perf_counter()
        tokens = [[step[row][0] for step in steps] for row in range(len(prompts))]
        return {"tokens": tokens, "prefill_s": first - start, "decode_s": last - first}


def main() -> None:
    """Loads the model and serves requests."""
    channel = protocol.claim_stdout()
    options = protocol.parser(__doc__ or "")
    options.add_argument("--compile", action="store_true", help="torch.compile the decode step")
    args = options.parse_args()
    engine = TransformersEngine(args.model, args.dtype, args.threads, args.compile)
    protocol.serve(engine, channel)


if __name__ == "__main__":
    main()
