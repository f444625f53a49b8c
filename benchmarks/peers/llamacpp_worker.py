"""Greedy decoding with llama.cpp through its low-level batch API, driven over standard input.

One context per batch size, flash attention on, all prompts in one batch. The type of the weights
is that of the GGUF file.
"""

import argparse
import ctypes
import platform
import time

import llama_cpp
import numpy as np
import protocol


class Batch:
    """A ``llama_batch`` that is filled from Python lists."""

    def __init__(self, capacity: int):
        self.raw = llama_cpp.llama_batch_init(capacity, 0, 1)

    def clear(self) -> None:
        """Empties the batch."""
        self.raw.n_tokens = 0

    def add(self, token: int, position: int, sequence: int, wants_logits: bool) -> int:
        """Appends one token and returns its index."""
        index = self.raw.n_tokens
        self.raw.token[index] = token
        self.raw.pos[index] = position
        self.raw.n_seq_id[index] = 1
        self.raw.seq_id[index][0] = sequence
        self.raw.logits[index] = wants_logits
        self.raw.n_tokens = index + 1
        return index

    def free(self) -> None:
        """Gives the memory back."""
        llama_cpp.llama_batch_free(self.raw)


class LlamaCppEngine:
    """One GGUF model and the context of the batch size used last."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(args.model.encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {args.model}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        self.context = None
        self.sequences = 0

    def describe(self) -> dict[str, object]:
        """Versions and settings."""
        text = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self.model, text, len(text))
        return {
            "python": platform.python_version(),
            "llama-cpp-python": llama_cpp.__version__,
            "model": text.value.decode(),
            "system": llama_cpp.llama_print_system_info().decode().strip(),
            "threads": self.args.threads,
            "flash_attention": True,
            "kv_unified": self.args.kv_unified,
        }

    def _prepare(self, sequences: int) -> None:
        """Makes or empties the context for so many sequences."""
        if self.context is not None and self.sequences == sequences:
            memory = llama_cpp.llama_get_memory(self.context)
            llama_cpp.llama_memory_clear(memory, True)
            return
        if self.context is not None:
            llama_cpp.llama_free(self.context)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * self.args.max_len
        params.n_batch = params.n_ctx
        params.n_ubatch = self.args.ubatch
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self.args.threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = self.args.kv_unified
        params.swa_full = False
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.sequences = sequences

    def _decode(self, batch: Batch, rows: list[int]) -> list[int]:
        """Runs the batch and returns the greedy token at each of the rows."""
        code = llama_cpp.llama_decode(self.context, batch.raw)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        picked = []
        for row in rows:
            logits = llama_cpp.llama_get_logits_ith(self.context, row)
            view = np.ctypeslib.as_array(logits, shape=(self.vocab_size,))
            picked.append(int(view.argmax()))
        return picked

    def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
        """Prefills all prompts in one batch, then decodes one token per sequence and step."""
        self._prepare(len(prompts))
        batch = Batch(sum(map(len, prompts)))
        start = time.perf_counter()
        batch.clear()
        rows = []
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                row = batch.add(token, position, sequence, position == len(prompt) - 1)
            rows.append(row)
        tokens = self._decode(batch, rows)
        outputs = [[token] for token in tokens]
        first = time.perf_counter()
        for step in range(max_tokens - 1):
            batch.clear()
            rows = [
                batch.add(token, len(prompts[sequence]) + step, sequence, True)
                for sequence, token in enumerate(tokens)
            ]
            tokens = self._decode(batch, rows)
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
        last = time.perf_counter()
        batch.free()
        return {"tokens": outputs, "prefill_s": first - start, "decode_s": last - first}


def main() -> None:
    """Loads the model and serves requests."""
    channel = protocol.claim_stdout()
    options = protocol.parser(__doc__ or "")
    options.add_argument("--ubatch", type=int, default=512)
    options.add_argument("--kv-unified", action="store_true")
    protocol.serve(LlamaCppEngine(options.parse_args()), channel)


if __name__ == "__main__":
    main()
