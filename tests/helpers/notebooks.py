"""Runs a notebook in a kernel of its own; as a script, writes the outputs that are committed.

python -m tests.helpers.notebooks [NAME ...]
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
CELL_SECONDS = 600  # the largest cell takes seconds; a busy machine more


def read(path: Path) -> nbformat.NotebookNode:
    """The notebook in a file."""
    return nbformat.read(path, as_version=4)


def execute(path: Path) -> nbformat.NotebookNode:
    """A copy with fresh outputs, run on the CPU in an empty directory.

    Raises:
        CellExecutionError: a cell failed; the message has its traceback.
    """
    notebook = read(path)
    environment = {name: os.environ[name] for name in os.environ if name != "XLA_FLAGS"} | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            config=Config(KernelManager={"transport": "ipc", "ip": f"{folder}/socket"}),
            timeout=CELL_SECONDS,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        return client.execute(env=environment)


def main(names: list[str]) -> None:
    """Writes the notebooks of these names, or all, with fresh outputs."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not names or path.stem in names:
            start = time.perf_counter()
            notebook = execute(path)
            notebook.metadata = read(path).metadata  # without the version of this Python
            nbformat.write(notebook, path)
            print(f"{path.name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
