"""The notebooks run, say what they said when they were committed, and keep their form."""

import re
from pathlib import Path

import nbformat
import pytest

from tests.helpers.docs import private_uses
from tests.helpers.notebooks import NOTEBOOKS, execute, read

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
MOST_BYTES = 300_000


def name_of(path: Path) -> str:
    return path.stem


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell: nbformat.NotebookNode) -> list[str]:
    """The text outputs of a cell."""
    outputs = [o.get("text", o.get("data", {}).get("text/plain", "")) for o in cell.outputs]
    return [text.strip() for text in outputs]


def checked(notebook: nbformat.NotebookNode) -> list[tuple[str, list[str]]]:
    """Cells whose outputs are the same wherever they run, and those outputs."""
    cells = [c for c in code_cells(notebook) if "checked" in c.metadata.get("tags", ())]
    return [(cell.source, texts(cell)) for cell in cells]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_a_notebook_runs_and_says_what_it_said(path: Path) -> None:
    """A cell that raises ends it, also by one of its assertions."""
    assert checked(execute(path)) == checked(read(path))


def test_there_are_six() -> None:
    assert [path.name[:2] for path in PATHS] == [f"{n:02}" for n in range(1, 7)]


@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_the_form_of_a_notebook(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert path.stat().st_size < MOST_BYTES
    first, *cells = code_cells(notebook)
    assert 'find_spec("hybrid_jax") is None' in first.source and "%pip install" in first.source
    assert [c.execution_count for c in (first, *cells)] == list(range(1, len(cells) + 2))
    assert len(checked(notebook)) >= 3
    assert all(any(outputs) for _, outputs in checked(notebook))
    assert all(o.get("name") != "stderr" for c in (first, *cells) for o in c.outputs)
    assert sum("assert" in cell.source for cell in cells) >= 3
    long = [line for cell in cells for line in cell.source.splitlines() if len(line) > 100]
    assert long == []


@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_a_notebook_uses_what_is_public(path: Path) -> None:
    sources = [cell.source for cell in code_cells(read(path))]
    code = "\n".join(sources)
    assert private_uses(re.sub(r"^(\s*)%.*$", r"\1pass", code, flags=re.M)) == []
