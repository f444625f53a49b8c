"""What the pages of the site say is right: their Python runs, and it uses what is public."""

import importlib
import inspect
from pathlib import Path

import pytest

from tests.helpers.docs import DOCS, ROOT, pages, private_uses, public_names, python_of

WITH_PYTHON = [page for page in pages() if python_of(page)]
SERVER = DOCS / "how-to" / "serve.md"  # tests/serving/test_docs_page.py runs it


OPS = [api.parent.name for api in sorted((ROOT / "pallas_kernels").glob("*/api.py"))]


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in WITH_PYTHON if p != SERVER], ids=name_of)
def test_the_python_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its assertions included."""
    monkeypatch.chdir(tmp_path)
    exec(compile(python_of(page), str(page), "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_pages_use_what_is_public(page: Path) -> None:
    assert private_uses(python_of(page)) == []


def test_what_is_not_public_is_noticed() -> None:
    code = "from hybrid_jax import LLM\nfrom hybrid_jax.runtime.runner import Runner\nLLM._ids\n"
    assert private_uses(code) == ["_ids", "hybrid_jax.runtime.runner.Runner"]
    code = "from pallas_kernels import gla\ngla.chunked(gla.reference)\nimport serving.bench\n"
    assert private_uses(code) == ["pallas_kernels.gla.reference", "serving.bench"]
    assert "hybrid_jax.LLM" in public_names()


@pytest.mark.parametrize(
    "package",
    ["hybrid_jax", "hybrid_jax.checking", "hybrid_jax.decoding", "hybrid_jax.measure"]
    + [f"pallas_kernels.{op}" for op in OPS],
)
def test_the_reference_has_all_that_a_package_exports(package: str) -> None:
    module = importlib.import_module(package)
    exported = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    ]
    public = public_names()
    assert package in public or {f"{package}.{name}" for name in exported} <= public
