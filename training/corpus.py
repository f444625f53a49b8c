"""The text corpus: the King James Bible of Debian's `bible-kjv` package, as chapters of prose.

    apt-get install bible-kjv
    python -m training.corpus --out DIR

Without root: `apt-get download bible-kjv bible-kjv-text`, unpack both with `dpkg -x FILE root`,
then pass `--bible root/usr/bin/bible --data root/usr/lib`.

The text is in the public domain (the 1611 translation's copyright has expired; in the United
Kingdom the Crown's patent still governs printing). The package's program is GPL-2+; only its
output, the text, is used here.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path

VERSE = re.compile(r"^(\w+?)(\d+):(\d+) (.*)$")
HELD_OUT_EVERY = 25
VERSES_PER_PARAGRAPH = 4


def read_verses(bible: str, data: str | None) -> list[tuple[str, str]]:
    """Return `(chapter, verse text)` pairs of the whole book in order."""
    # -f switches pretty-printing off: one verse a line behind its reference ("Ge1:1 In the ...").
    command = [bible, "-f", *(["-p", data] if data else []), "gen1:1-rev22:21"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, input="").stdout
    verses = []
    for line in printed.splitlines():
        match = VERSE.match(line)
        if match is None:
            raise ValueError(f"not a verse: {line[:80]!r}")
        book, chapter, _, text = match.groups()
        verses.append((f"{book} {chapter}", " ".join(text.split())))
    return verses


def to_chapters(verses: list[tuple[str, str]]) -> list[str]:
    """Join verses into one string a chapter, a line break after every few verses."""
    chapters: dict[str, list[str]] = {}
    for chapter, text in verses:
        chapters.setdefault(chapter, []).append(text)
    step = VERSES_PER_PARAGRAPH
    return [
        "\n".join(" ".join(texts[i : i + step]) for i in range(0, len(texts), step))
        for texts in chapters.values()
    ]


def split(chapters: list[str]) -> tuple[list[str], list[str]]:
    """Whole chapters go to one side, so that no held-out verse has its context in training."""
    train = [text for i, text in enumerate(chapters) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    held_out = chapters[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return train, held_out


def load(directory: Path) -> tuple[list[str], list[str]]:
    """Read what `main` wrote: the training chapters and the held-out chapters."""
    stored = json.loads((directory / "corpus.json").read_text())
    return stored["train"], stored["held_out"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for corpus.json")
    parser.add_argument("--bible", default="bible", help="the package's program")
    parser.add_argument("--data", help="directory of bible.data, if not the installed one")
    args = parser.parse_args()
    train, held_out = split(to_chapters(read_verses(args.bible, args.data)))
    args.out.mkdir(parents=True, exist_ok=True)
    stored = json.dumps({"train": train, "held_out": held_out})
    (args.out / "corpus.json").write_text(stored)
    sizes = [sum(map(len, texts)) for texts in (train, held_out)]
    print(f"train: {len(train)} chapters, {sizes[0]} characters")
    print(f"held out: {len(held_out)} chapters, {sizes[1]} characters")


if __name__ == "__main__":
    main()
