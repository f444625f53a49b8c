"""Rules about the repository itself: CONTRIBUTING.md's limits, and that documents stay true."""

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.models import FAMILIES
from pallas_kernels import registry
from serving.cli import app
from tests.helpers import tiny
from tests.helpers.docs import commands, pages

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hybrid_jax", "pallas_kernels", "serving")
FOLDERS = (*PACKAGES, "training", "benchmarks", "tests", "docs", "notebooks")
MAX_FILE, MAX_KERNEL_FILE, MAX_CLASS, MAX_FUNCTION = 500, 800, 300, 60


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return [path for path in found if "_pb2" not in path.name]  # made by protoc


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def definitions(path: Path) -> Iterator[tuple[ast.AST, str, int]]:
    """Classes and functions of a file with their number of lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node, node.name, node.end_lineno - node.lineno + 1


def test_files_classes_and_functions_are_short() -> None:
    """Kernels may be longer: there, the whole of an algorithm is one function."""
    too_long = []
    for path in sources(*FOLDERS):
        lines = len(path.read_text().splitlines())
        kernel = path.is_relative_to(ROOT / "pallas_kernels")
        if lines >= (MAX_KERNEL_FILE if kernel else MAX_FILE):
            too_long.append(f"{name_of(path)}: {lines} lines")
        for node, name, length in definitions(path):
            limit = MAX_CLASS if isinstance(node, ast.ClassDef) else MAX_FUNCTION
            if length >= limit and not (kernel and not isinstance(node, ast.ClassDef)):
                too_long.append(f"{name_of(path)}: {name} has {length} lines")
    assert too_long == []


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"utils", "util", "common", "misc", "helpers"}
    names = {
        name_of(p): {p.stem, *(part for part in p.relative_to(ROOT).parts[:-1])}
        for p in sources(*FOLDERS)
    }
    allowed = {"helpers"}  # tests/helpers is a folder of named parts
    assert [n for n, parts in names.items() if parts & drawers - allowed] == []
    assert [n for n in names if Path(n).stem in drawers] == []


def test_no_absolute_path_is_written_down() -> None:
    """In code, documents and settings alike."""
    root = re.compile(r"(?<![\w.:/~$}>])/(home|work|root|tmp|usr|opt|mnt|Users|data)/\w")
    files = [p for p in ROOT.glob("*.*") if p.suffix in (".md", ".toml", ".yml")]
    files += [
        p
        for f in FOLDERS
        for p in (ROOT / f).rglob("*")
        if p.suffix in (".py", ".md", ".json", ".ipynb")
    ]
    files += [ROOT / ".ci" / "run"]
    found = [
        f"{name_of(path)}: {line.strip()[:80]}"
        for path in files
        if path != Path(__file__).resolve() and "__pycache__" not in path.parts
        for line in path.read_text().splitlines()
        if not line.startswith("#!") and root.search(line)
    ]
    assert found == []


def test_public_definitions_of_the_packages_have_docstrings() -> None:
    missing = []
    for path in sources(*PACKAGES):
        tree = ast.parse(path.read_text())
        if tree.body and not ast.get_docstring(tree):
            missing.append(name_of(path))
        for node in tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                missing.append(f"{name_of(path)}: {node.name}")
    assert missing == []


@pytest.mark.parametrize("config", [EngineConfig, ModelConfig])
def test_every_field_of_a_config_is_read(config: type) -> None:
    """A field that nobody reads is a promise that nobody keeps."""
    read = set()
    for path in sources(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = ast.unparse(node.value).split(".")[-1]
                # Not `self`: that a config checks its own field is no use of it.
                if owner.strip("_") in ("config", "model", "model_config", "engine"):
                    read.add(node.attr)
    assert {f.name for f in fields(config)} - read == set()


def test_every_family_has_a_tiny_checkpoint() -> None:
    """Multimodal types are those of the wrapping config.json; their text models count."""
    types = set()
    for config in tiny.TINY.values():
        types |= {config["model_type"], config.get("text_config", config)["model_type"]}
    bare = {name.removesuffix("_text") for name in types}
    assert {name.removesuffix("_text") for name in FAMILIES} == bare


def test_every_op_has_reference_cases_and_readme() -> None:
    folders = [p for p in (ROOT / "pallas_kernels").iterdir() if (p / "api.py").exists()]
    assert len(folders) >= 3
    for folder in folders:
        for file in ("__init__.py", "api.py", "reference.py", "cases.py", "README.md"):
            assert (folder / file).is_file(), f"{name_of(folder)} has no {file}"
        assert (ROOT / "tests" / "kernels" / f"test_{folder.name}.py").is_file()
        importlib.import_module(f"pallas_kernels.{folder.name}")
        assert registry.REFERENCE in registry.implementations(folder.name)


def test_the_commands_of_the_documents_exist() -> None:
    root = typer.main.get_command(app)
    found = commands(ROOT / "README.md")
    assert {command[1] for command in found} == set(root.commands)  # type: ignore[attr-defined]
    found += [command for page in pages() for command in commands(page)]
    for _, name, *arguments in found:
        command = root.commands[name]  # type: ignore[attr-defined]
        while hasattr(command, "commands"):  # a group: the next word is one of its own, mostly
            context = command.make_context(name, [], resilient_parsing=True)
            name, command, arguments = command.resolve_command(context, arguments)
        context = command.make_context(name, list(arguments))  # raises on an unknown option
        assert context.params


def test_the_flags_that_pages_name_exist() -> None:
    """Those in the text, which belong to no command that could be tried."""
    groups, flags = [typer.main.get_command(app)], set[str]()
    while groups:
        command = groups.pop()
        groups += getattr(command, "commands", {}).values()
        flags |= {name for param in command.params for name in param.opts + param.secondary_opts}
    named = {n for page in pages() for n in re.findall(r"`(--[\w-]+)", page.read_text())}
    assert len(named) > 10
    assert named - flags == set()


def test_what_documents_link_and_name_exists() -> None:
    documents = (
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
    )  # mkdocs checks the pages' links
    for document in documents:
        text = (ROOT / document).read_text()
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (ROOT / target).exists(), f"{document} links {target}"
    for page in [ROOT / name for name in documents] + pages():
        for path in re.findall(r"`((?:\w[\w.-]*/)+[\w.-]*)`", page.read_text()):
            if path.split("/")[0] in FOLDERS and "<" not in path:
                assert (ROOT / path).exists(), f"{name_of(page)} names {path}"
    architecture = (ROOT / "ARCHITECTURE.md").read_text()
    for path in re.findall(r"`(\w+/\w+\.py)`", architecture):
        assert any((ROOT / p / path).exists() for p in ("", *PACKAGES)), path
