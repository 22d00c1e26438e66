"""Looks at a streamed answer as it passes: when tokens came, how many, and how it ended.

The bytes belong to the client and are passed on untouched by the caller; nothing here can
change or delay them. It runs once per chunk of every stream, so the usual chunk (one whole
event) takes a path without buffers, and a hostile one costs bounded memory and linear time.
"""

from __future__ import annotations

from typing import Final

import msgspec

from goodput_core.units import NS_PER_US

__all__ = ["TokenObserver"]

_MAX_LINE_BYTES: Final = 256 << 10
_PREFIX: Final = b"data: "
_ABSENT: Final = msgspec.Raw(b"")
_NULL: Final = msgspec.Raw(b"null")


# Raw fields take whatever stands there: a server that sends a list where OpenAI sends a string
# is still measured, and no string is ever built.
class _Delta(msgspec.Struct, gc=False):
    content: msgspec.Raw = _ABSENT
    reasoning_content: msgspec.Raw = _ABSENT
    reasoning: msgspec.Raw = _ABSENT
    refusal: msgspec.Raw = _ABSENT
    tool_calls: msgspec.Raw = _ABSENT


class _Choice(msgspec.Struct, gc=False):
    text: msgspec.Raw = _ABSENT
    delta: _Delta | None = None
    finish_reason: msgspec.Raw = _ABSENT


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = _ABSENT


class TokenObserver:
    """Times the tokens of one answer in OpenAI's streaming form.

    A token is an event that carries non-empty content, reasoning or a tool call; where the
    answer reports its usage, that count stands instead. Lines that are not JSON, or not in
    OpenAI's form, are passed over. A line longer than 256 KiB counts as one token, unread.

    Args:
        keep_gaps: whether to keep every gap between tokens.

    Attributes:
        first_ns, last_ns: when the first and the last token came; None before there is one.
        gaps_us: microseconds between consecutive tokens, when kept.
        finished: whether the answer said that it is complete.
        error: whether the answer carried an error event.
    """

    __slots__ = (
        "_decode",
        "_events",
        "_keep_gaps",
        "_parts",
        "_parts_bytes",
        "_skipping",
        "_usage_tokens",
        "error",
        "finished",
        "first_ns",
        "gaps_us",
        "last_ns",
    )

    def __init__(self, *, keep_gaps: bool = False) -> None:
        self._decode = _DECODER.decode
        self._events = 0
        self._usage_tokens = 0
        self._keep_gaps = keep_gaps
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._skipping = False
        self.gaps_us: list[int] = []
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.finished = False
        self.error = False

    @property
    def tokens(self) -> int:
        """Tokens so far; what the answer says of itself wins."""
        return self._usage_tokens or self._events

    def feed(self, chunk: bytes, now_ns: int) -> None:
        """Look at the next bytes of the answer, split and merged however the network did."""
        if (
            not self._parts
            and not self._skipping
            and chunk.startswith(_PREFIX)
            and chunk.find(b"\n") == len(chunk) - 2
            and chunk.endswith(b"\n\n")
        ):
            self._event(chunk[6:], now_ns)
            return
        self._feed_lines(chunk, now_ns)

    def _feed_lines(self, chunk: bytes, now_ns: int) -> None:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            if self._skipping:
                self._skipping = False
            elif self._parts:
                self._parts.append(chunk[start:end])
                line = b"".join(self._parts)
                self._parts.clear()
                self._parts_bytes = 0
                self._line(line, now_ns)
            elif end > start:
                self._line(chunk[start:end], now_ns)
            start = end + 1
        if start == len(chunk) or self._skipping:
            return
        self._parts.append(chunk[start:])
        self._parts_bytes += len(chunk) - start
        if self._parts_bytes > _MAX_LINE_BYTES:
            if b"".join(self._parts[:8]).startswith(b"data:"):
                self._token(now_ns)
            self._parts.clear()
            self._parts_bytes = 0
            self._skipping = True

    def _line(self, line: bytes, now_ns: int) -> None:
        if line.startswith(b"data:"):
            self._event(line[5:], now_ns)

    def _event(self, data: bytes, now_ns: int) -> None:
        try:
            event = self._decode(data)
        except msgspec.MsgspecError:
            if data.strip() == b"[DONE]":
                self.finished = True
            return
        if event.choices:
            spoke = False
            for choice in event.choices:
                delta = choice.delta
                spoke = spoke or _filled(choice.text) or (delta is not None and _speaks(delta))
                if _filled(choice.finish_reason):
                    self.finished = True
            if spoke:
                self._token(now_ns)
        if event.usage is not None and event.usage.completion_tokens is not None:
            self._usage_tokens = event.usage.completion_tokens
        if _filled(event.error):
            self.error = True

    def _token(self, now_ns: int) -> None:
        self._events += 1
        if self.last_ns is None:
            self.first_ns = now_ns
        elif self._keep_gaps:
            self.gaps_us.append((now_ns - self.last_ns) // NS_PER_US)
        self.last_ns = now_ns


_DECODER: Final = msgspec.json.Decoder(_Event)


def _filled(raw: msgspec.Raw) -> bool:
    """Neither absent, nor null, nor an empty string, list or object."""
    return len(raw) > 2 and raw != _NULL


def _speaks(delta: _Delta) -> bool:
    return (
        _filled(delta.content)
        or _filled(delta.reasoning_content)
        or _filled(delta.reasoning)
        or _filled(delta.tool_calls)
        or _filled(delta.refusal)
    )
