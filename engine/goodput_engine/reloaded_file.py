"""A file that is read again after each change, which replaces its content without a restart."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from goodput_core.errors import InputError
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["ReloadedFile"]

_Content = TypeVar("_Content")
_CHECK_NS: Final = NS_PER_S
_log: Final = logging.getLogger(__name__)


class ReloadedFile(Generic[_Content]):
    """The parsed content of a file.

    If the new content is invalid or missing, the last valid one remains in use.

    Args:
        path: the file.
        parse: parses its bytes; raises InputError with a message that does not name the file.
        limit_bytes: number of bytes that are read; one more tells `parse` that there are more.
        replaced, kept: log events of a replacement, and of an invalid new content.
        remedy: what to do if the file cannot be read.
        clock: returns monotonic nanoseconds. At most once per second, `refresh` looks for changes.

    Attributes:
        content: the last valid content.
        problem: error of the file's present content; empty if it is in use.

    Raises:
        InputError: the file is unreadable or invalid.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[bytes], _Content],
        *,
        limit_bytes: int,
        replaced: str,
        kept: str,
        remedy: str,
        clock: Callable[[], int],
    ) -> None:
        self._path = path
        self._parse = parse
        self._limit_bytes = limit_bytes
        self._replaced = replaced
        self._kept = kept
        self._remedy = remedy
        self._clock = clock
        self._stamp: tuple[int, int, int] | None = None
        self.problem = ""
        self.content = self._read()
        self._checked_ns = clock()

    def refresh(self) -> bool:
        """Read the file again if it changed; return True if the content was replaced."""
        now_ns = self._clock()
        if now_ns - self._checked_ns < _CHECK_NS:
            return False
        self._checked_ns = now_ns
        try:
            if self._present_stamp() == self._stamp:
                return False
            self.content = self._read()
        except InputError as error:
            problem = str(error)
            if problem != self.problem:
                _log.warning(self._kept, extra={"detail": problem})
            self.problem = problem
            return False
        self.problem = ""
        _log.info(self._replaced, extra={"file": str(self._path)})
        return True

    def _present_stamp(self) -> tuple[int, int, int] | None:
        """Return values that differ after each change of the file; None if it cannot be found."""
        try:
            return _stamp_of(self._path.stat())
        except OSError:
            return None

    def _read(self) -> _Content:
        """Return the content of the file.

        Raises:
            InputError: the file is unreadable or invalid.
        """
        self._stamp = None
        try:
            with self._path.open("rb") as file:
                # A change during the read must differ from this, so that it is read the next time.
                stat = os.fstat(file.fileno())
                data = file.read(self._limit_bytes + 1)
        except OSError as error:
            raise InputError(f"{self._path}: {error.strerror}; {self._remedy}") from error
        # Invalid content is not read again before it changes.
        self._stamp = _stamp_of(stat)
        try:
            return self._parse(data)
        except InputError as error:
            raise InputError(f"{self._path}: {error}") from error


def _stamp_of(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
