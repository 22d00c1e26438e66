"""Writing lines to stdout or stderr without ever waiting for who reads them.

A terminal held by Ctrl-S, or a parent that does not read, must not stop the supervisor: a
thread does the writing, and what does not fit the bounded queue is counted and said.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Final

__all__ = ["Outlet"]

_MAX_QUEUED_BYTES: Final = 1 << 20


class Outlet:
    """Lines to one file descriptor.

    Args:
        fd: where to write; it stays open.
        max_queued_bytes: lines beyond this are dropped until the reader has caught up.
    """

    def __init__(self, fd: int, *, max_queued_bytes: int = _MAX_QUEUED_BYTES) -> None:
        self._fd = fd
        self._max_queued_bytes = max_queued_bytes
        self._lines: deque[bytes] = deque()
        self._queued_bytes = 0
        self._dropped = 0
        self._closed = False
        self._changed = threading.Condition()
        # A daemon, and no buffered stream: a reader that never comes cannot hold up the exit.
        self._thread = threading.Thread(target=self._write_all, name=f"outlet-{fd}", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue one line; returns at once."""
        data = f"{line}\n".encode("utf-8", "replace")
        with self._changed:
            if self._queued_bytes + len(data) > self._max_queued_bytes:
                self._dropped += 1
                return
            self._own_up()
            self._push(data)

    def close(self, timeout_s: float = 1.0) -> None:
        """Let the queued lines be written for at most this long."""
        with self._changed:
            self._own_up()
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _own_up(self) -> None:
        if self._dropped:
            self._push(f"… {self._dropped} lines dropped: nobody read them in time\n".encode())
            self._dropped = 0

    def _push(self, data: bytes) -> None:
        self._lines.append(data)
        self._queued_bytes += len(data)
        self._changed.notify()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                batch = b"".join(self._lines)
                self._lines.clear()
            try:
                self._write(batch)
            except OSError:
                pass  # the reader is gone or the disk is full: serving matters more than its log
            with self._changed:
                self._queued_bytes -= len(batch)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
