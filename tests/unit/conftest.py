"""The command line in this process, and what tests of it share."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from serving import cli

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("inspect", path)`: exit code, stdout and stderr of the command, in this process."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hybrid-jax", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def change_tensors(directory: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: array.copy() for name, array in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def is_one_sentence(text: str) -> bool:
    return text.startswith("hybrid-jax: ") and text.count("\n") == 1 and "Traceback" not in text
