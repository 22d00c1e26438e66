"""Cutting a child's output into lines that are bounded, whatever the child writes."""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_LINE_BYTES", "LineSplitter"]

MAX_LINE_BYTES: Final = 8192
# A log line may carry a client's bytes: what a terminal would obey is shown, not obeyed.
_CONTROLS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 9}


class LineSplitter:
    """Bytes in, whole lines out; of a line over `MAX_LINE_BYTES` only the beginning is kept."""

    def __init__(self) -> None:
        self._part = bytearray()
        self._cut = 0

    def feed(self, data: bytes) -> list[str]:
        """The lines that these bytes complete, without their line ends."""
        *whole, rest = data.split(b"\n")
        lines = []
        for piece in whole:
            self._take(piece)
            lines.append(self._line())
        self._take(rest)
        return lines

    def end(self) -> list[str]:
        """The last line, if it had no line end."""
        return [self._line()] if self._part else []

    def _take(self, piece: bytes) -> None:
        room = MAX_LINE_BYTES - len(self._part)
        self._part += piece[:room]
        self._cut += max(0, len(piece) - room)

    def _line(self) -> str:
        text = self._part.decode("utf-8", "replace").removesuffix("\r").translate(_CONTROLS)
        if self._cut:
            text += f"… ({self._cut} bytes cut)"
        self._part.clear()
        self._cut = 0
        return text
