"""Server-sent events from bytes, however the network cut them.

Only the `data` of each event matters to an OpenAI stream; names, ids and comments are read over.
The parser holds at most one unfinished event, bounded, so a hostile stream costs a megabyte and
not the machine. It does not know what the data means.

Source: WHATWG HTML, "Parsing an event stream".
"""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_LINE_BYTES", "LineTooLongError", "SSEParser"]

MAX_LINE_BYTES: Final = 1 << 20
_BOM: Final = b"\xef\xbb\xbf"


class LineTooLongError(ValueError):
    """A line, or the lines of one event, beyond the bound."""


class SSEParser:
    """Feed bytes, take the data of the events they finish.

    Args:
        max_line_bytes: bound of one line and of the data of one event.
    """

    __slots__ = ("_at_start", "_data", "_data_bytes", "_max", "_skip_lf", "_tail")

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max = max_line_bytes
        self._tail = b""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._skip_lf = False
        self._at_start = True

    @property
    def inside_event(self) -> bool:
        """Whether bytes of an unfinished event are held: a stream that ends here was cut."""
        return bool(self._tail or self._data)

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that `chunk` finishes, in order.

        Raises:
            LineTooLongError: a line or an event beyond the bound; the parser is then useless.
        """
        if (
            chunk.endswith(b"\n\n")
            and not self._tail
            and not self._data
            and not self._skip_lf
            and len(chunk) <= self._max
            and b"\r" not in chunk
        ):
            # Whole events in one piece: what a streaming server sends almost always.
            parts = chunk[:-2].split(b"\n\n")
            if all(part.startswith(b"data: ") and b"\n" not in part for part in parts):
                self._at_start = False
                return [part[6:] for part in parts]
        return self._feed_lines(chunk)

    def _feed_lines(self, chunk: bytes) -> list[bytes]:
        if self._at_start:
            chunk = self._tail + chunk
            self._tail = b""
            if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
                self._tail = chunk
                return []
            self._at_start = False
            chunk = chunk.removeprefix(_BOM)
        if not chunk:
            return []
        if self._skip_lf:
            chunk = chunk.removeprefix(b"\n")
            self._skip_lf = False
            if not chunk:
                return []
        if b"\r" in chunk:
            self._skip_lf = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = (self._tail + chunk).split(b"\n")
        self._tail = lines.pop()
        events: list[bytes] = []
        for line in lines:
            self._check(len(line))
            if line:
                self._take(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._data_bytes = 0
        self._check(len(self._tail))
        return events

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name != b"data":
            return
        value = value.removeprefix(b" ")
        self._data.append(value)
        self._data_bytes += len(value) + 1
        self._check(self._data_bytes)

    def _check(self, length: int) -> None:
        if length > self._max:
            raise LineTooLongError(f"line too long: over {self._max} bytes without an end")
