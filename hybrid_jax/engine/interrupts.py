"""Ctrl-C comes between what belongs together, never within."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Puts SIGINT off to the end of the block, or of the function that it decorates.

    Its handler usually raises, at any instruction of the main thread, and what is half done there
    cannot be taken back: a token without its event, an event of a sequence that still runs.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[FrameType | None] = []
    try:
        signal.signal(signal.SIGINT, lambda number, frame: caught.append(frame))
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for frame in caught[:1]:
            handler(signal.SIGINT, frame)
