"""The pages of docs/: their Python, their commands, and what their reference makes public."""

import ast
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PACKAGES = ("hybrid_jax", "pallas_kernels", "serving")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def pages() -> list[Path]:
    """All pages that lie in docs/."""
    return sorted(DOCS.rglob("*.md"))


def python_of(page: Path) -> str:
    """The Python of a page, its blocks one after another, each in the line where it stands."""
    text, code = page.read_text(), ""
    for block in _BLOCK.finditer(text):
        if block[1] == "python":
            line = text.count("\n", 0, block.start(2))
            code += "\n" * (line - code.count("\n")) + block[2]
    return code


def commands(document: Path) -> list[list[str]]:
    """The `hybrid-jax ...` commands of a document's code blocks, split as a shell would."""
    blocks = [block[2] for block in _BLOCK.finditer(document.read_text()) if block[1] != "python"]
    lines = [
        part.strip()
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
        for part in line.split("&&")
    ]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("hybrid-jax ")]


def public_names() -> set[str]:
    """What the pages of docs/reference name: the public API."""
    reference = (DOCS / "reference").glob("*.md")
    found = [re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M) for page in reference]
    return {name for names in found for name in names}


def private_uses(code: str) -> list[str]:
    """What Python code takes of this project's packages that is not public."""
    tree = ast.parse(code)
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES
        for alias in node.names
    }
    modules = {alias: name for alias, name in imported.items() if _is_module(name)}
    used = [name for name in imported.values() if not _is_module(name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in modules:
                used.append(f"{modules[node.value.id]}.{node.attr}")
            elif node.attr.startswith("_") and not node.attr.startswith("__"):
                used.append(node.attr)
        elif isinstance(node, ast.Import):  # whole packages, whose names nobody could check
            used += [a.name for a in node.names if a.name.split(".")[0] in PACKAGES]
    public = public_names()
    return sorted({n for n in used if n not in public and n.rpartition(".")[0] not in public})


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()
