"""Snapshots on their way to and from clients, and in the directory that the operator named."""

import asyncio
import os
import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from hybrid_jax.cache.snapshot import Snapshot
from hybrid_jax.errors import InvalidRequest, SnapshotError
from serving.errors import NoSnapshotDirectory, NotFound, RequestTooLarge

PIECE = 2**20  # bytes of a piece; below any limit on messages
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # no separator, and nothing hidden


class SnapshotFiles:
    """Files of snapshots in one directory, by name. No name leads out of it."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    async def save(self, snapshot: Snapshot, name: str) -> None:
        """Writes a snapshot; readers of the name see the old file or the new one.

        Raises:
            InvalidRequest: the name is none. NoSnapshotDirectory: the operator named none.
        """
        path = self._path(name)

        def write() -> None:
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as directory:
                unfinished = Path(directory) / name
                snapshot.save(unfinished)
                os.replace(unfinished, path)

        await asyncio.to_thread(write)

    async def load(self, name: str) -> Snapshot:
        """Reads a snapshot.

        Raises:
            NotFound: there is none. SnapshotError: it is damaged.
            InvalidRequest: the name is none. NoSnapshotDirectory: the operator named none.
        """
        path = self._path(name)
        if not path.is_file():
            raise NotFound(f"there is no snapshot {name!r} in the server's snapshot_dir")
        return await asyncio.to_thread(_load, path, f"the snapshot {name!r}")

    def _path(self, name: str) -> Path:
        if self._directory is None:
            raise NoSnapshotDirectory(
                "the server keeps no files of snapshots; start it with --snapshot-dir, or have the "
                "snapshot sent"
            )
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{ascii(name)[:80]} is no name of a snapshot; use letters, digits, '.', '_' and "
                "'-', and begin with a letter or digit"
            )
        return self._directory / name


async def pieces_of(snapshot: Snapshot) -> AsyncIterator[bytes]:
    """The bytes of a snapshot's file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "snapshot"
        await asyncio.to_thread(snapshot.save, path)
        with path.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, PIECE):
                yield piece


async def from_pieces(pieces: AsyncIterator[bytes], most: int) -> Snapshot:
    """The snapshot that `pieces_of` cut up. Raises RequestTooLarge: more than `most` bytes."""
    with tempfile.TemporaryDirectory() as directory:
        path, size = Path(directory) / "snapshot", 0
        with path.open("wb") as file:
            async for piece in pieces:
                size += len(piece)
                if size > most:
                    raise RequestTooLarge(
                        f"the snapshot has more than max_snapshot_bytes ({most}); raise it"
                    )
                await asyncio.to_thread(file.write, piece)
        return await asyncio.to_thread(_load, path, "the snapshot that was sent")


def _load(path: Path, name: str) -> Snapshot:
    """Errors say `name`: where the server has its files is nobody's business."""
    try:
        return Snapshot.load(path)
    except SnapshotError as error:
        raise SnapshotError(str(error).replace(str(path), name)) from error
