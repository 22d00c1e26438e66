"""Progress of a fetch: lines of JSON from the process that fetches to the one that waits."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FetchProgress"]

_INTERVAL_S: Final = 1.0


class FetchProgress:
    """Writes the phases, warnings and the result of a fetch. Threads may share it.

    Args:
        out: the lines go there.
        interval_s: time between two lines of a phase.
    """

    def __init__(self, out: IO[str], *, interval_s: float = _INTERVAL_S) -> None:
        self._out = out
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._done = 0

    def add(self, count: int) -> None:
        """Count bytes of the running phase."""
        with self._lock:
            self._done += count

    def warn(self, warning: str) -> None:
        """Write a sentence for the user."""
        self.write({"warning": warning})

    def write(self, line: dict[str, Any]) -> None:
        """Write a line; the last one has the folder or the error."""
        with self._lock:
            self._out.write(f"{json.dumps(line)}\n")
            self._out.flush()

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator[None]:
        """Write the state of a phase now and in intervals.

        Args:
            title: an imperative, such as "download the weights".
            total: number of bytes; 0 if the phase does not count them.
        """
        self._done = 0
        ended = threading.Event()

        def report() -> None:
            while True:
                self.write({"phase": title, "done": self._done, "total": total})
                if ended.wait(self._interval_s):
                    return

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
