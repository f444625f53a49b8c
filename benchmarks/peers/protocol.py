"""The line protocol between the benchmark driver and one engine's process.

A worker prints one JSON line once its model is loaded, then answers every JSON line it reads.
A request is ``{"prompts": [[id, ...], ...], "max_tokens": n}``; all prompts have one length.
The answer is ``{"tokens": [[id, ...], ...], "prefill_s": t, "decode_s": t}``: the time up to the
first token of the last sequence, and the time from there to the last token.
"""

import argparse
import json
import os
import sys
from typing import Protocol, TextIO


class Engine(Protocol):
    """What a worker offers to :func:`serve`."""

    def describe(self) -> dict[str, object]:
        """Versions and settings, printed once."""
        ...

    def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
        """Decodes ``max_tokens`` greedy tokens per prompt and times both phases."""
        ...


def claim_stdout() -> TextIO:
    """Keeps the real standard output for the protocol; whatever else prints goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return channel


def parser(description: str) -> argparse.ArgumentParser:
    """The options every worker shares."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--model", required=True, help="model directory or GGUF file")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--max-batch", type=int, default=16)
    options.add_argument("--max-len", type=int, default=256, help="prompt and new tokens")
    return options


def serve(engine: Engine, channel: TextIO) -> None:
    """Answers requests until standard input ends."""
    channel.write(json.dumps(engine.describe()) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        answer = engine.run(request["prompts"], request["max_tokens"])
        channel.write(json.dumps(answer) + "\n")
