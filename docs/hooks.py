"""Pages of the site that have their place elsewhere in the repository: one text, one file."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "benchmarks/README.md": "benchmarks/README.md",
    "pallas_kernels/*/README.md": "kernels/{folder}/README.md",
    "notebooks/*.ipynb": "notebooks/{name}",  # to download
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds them before links are resolved, so that links from page to page are checked."""
    for pattern, address in PAGES.items():
        for path in sorted(ROOT.glob(pattern)):
            address_here = address.format(folder=path.parent.name, name=path.name)
            files.append(File.generated(config, address_here, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Of links from a page here to one of those: in the site they do not leave this folder."""
    del files
    if page.file.src_dir != config.docs_dir:
        return markdown
    inside = "../" * page.file.src_uri.count("/")
    return markdown.replace(f"](../{inside}", f"]({inside}")
