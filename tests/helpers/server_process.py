"""`hybrid-jax serve` in a process of its own, on the bundled model."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

START_SECONDS = 600  # importing and compiling, on a busy machine


class ServerProcess:
    """A server that is starting; its logs are read while it runs."""

    def __init__(self, *arguments: str) -> None:
        cache = jax.config.values["jax_compilation_cache_dir"]
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-c", "from serving.cli import main; main()", "serve"]
        self.process = subprocess.Popen(
            [*command, "--http-port", "0", *arguments], stderr=subprocess.PIPE, env=environment
        )
        self.lines: list[str] = []
        self.url: str | None = None
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = raw.decode()
            self.lines.append(line)
            if '"listening"' in line:
                self.url = json.loads(line)["url"]
                self._listening.set()
        self._listening.set()

    def wait_until_listening(self) -> str:
        """Where it listens."""
        assert self._listening.wait(START_SECONDS)
        assert self.url is not None, "".join(self.lines)
        return self.url

    def logs(self) -> list[dict[str, Any]]:
        """All that it has logged."""
        return [json.loads(line) for line in self.lines]

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Reads its last words. It has ended."""
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def wait(self) -> int:
        """Its exit code."""
        code = self.process.wait(60)
        return code


@contextmanager
def server_process(*arguments: str | Path) -> Iterator[ServerProcess]:
    """A process that is gone at the end, whatever happens."""
    process = ServerProcess(*map(str, arguments))
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()
        process.close()
