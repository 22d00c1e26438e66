"""Readers of server-sent events, for router and replayer.

`SSEReader` returns the data of each event, wherever the network split the stream of bytes.
`TokenObserver` times the tokens of a stream that the router forwards. Both run once per token.
Usually a chunk is exactly one complete event, so this case does not use buffers.

Source: WHATWG HTML, "Parsing an event stream".
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from typing import Any, Final

import msgspec

from goodput_core.contract import BUCKETS_TPOT_S
from goodput_core.units import NS_PER_S, NS_PER_US
from goodput_engine.openai.errors import is_failure, is_overload, read_error

__all__ = [
    "LineTooLongError",
    "SSEReader",
    "TokenObserver",
    "without_nan",
]

_MAX_LINE_BYTES: Final = 1 << 20
_MAX_OBSERVED_BYTES: Final = 256 << 10
_BOM: Final = b"\xef\xbb\xbf"
_ABSENT: Final = msgspec.Raw(b"")
_NULL: Final = msgspec.Raw(b"null")
_EMPTY_TEXT: Final = msgspec.Raw(b'""')
_PLAIN: Final = re.compile(rb'[^"\\\x00-\x1f]*')
_GAP_BOUNDS_NS: Final = [round(bound * NS_PER_S) for bound in BUCKETS_TPOT_S]
_KEEP_ALIVE: Final = frozenset({b"ping", b"heartbeat", b"keepalive", b"keep-alive"})


class LineTooLongError(ValueError):
    """A line, or the data of one event, exceeds the limit."""


class SSEReader:
    """Reads the data of events from chunks of bytes; other fields and comments are ignored.

    An event with the name `error` is not returned like the others, but stored in `error`. Events
    with the name `ping`, `heartbeat`, `keepalive` or `keep-alive` are ignored.

    Memory is bounded by one event, and time is linear in the bytes, for any input.

    Args:
        max_line_bytes: limit of one line, and of the data of one event.
        skip_long: True to drop longer lines and events, and count them in `skipped`; False to
            raise an error for them.

    Attributes:
        error: data of the first event with the name `error`; None without such an event.
        idle: True if no line or event is unfinished.
        skipped: number of events and of lines of data that were dropped because of their length.
    """

    __slots__ = (
        "_at_start",
        "_data",
        "_data_bytes",
        "_max_bytes",
        "_name",
        "_parts",
        "_parts_bytes",
        "_skip_lf",
        "_skip_long",
        "_skipping",
        "error",
        "idle",
        "skipped",
    )

    def __init__(self, max_line_bytes: int = _MAX_LINE_BYTES, *, skip_long: bool = False) -> None:
        self._max_bytes = max_line_bytes
        self._skip_long = skip_long
        self._parts: list[bytes] = []  # pieces of the unfinished line
        self._parts_bytes = 0
        self._data: list[bytes] = []  # data lines of the unfinished event
        self._data_bytes = 0
        self._name = b""  # name of the unfinished event
        self._at_start = True
        self._skip_lf = False
        self._skipping = False
        self.idle = True
        self.error: bytes | None = None
        self.skipped = 0

    @property
    def inside_event(self) -> bool:
        """True if an event is unfinished; a stream that ends in this state was truncated."""
        return bool(self._parts or self._data or self._skipping)

    @property
    def held_bytes(self) -> int:
        """Number of buffered bytes of the unfinished line."""
        return self._parts_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of every event that `chunk` finishes, in order.

        Raises:
            LineTooLongError: a line or an event exceeds the limit and `skip_long` is False. The
                reader cannot be used afterwards.
        """
        if (
            self.idle
            and chunk.endswith(b"\n\n")
            and chunk.startswith(b"data: ")
            and len(chunk) <= self._max_bytes
            and b"\r" not in chunk
        ):
            self._at_start = False
            if chunk.find(b"\n") == len(chunk) - 2:
                return [chunk[6:-2]]
            events = chunk[:-2].split(b"\n\n")
            if all(event.startswith(b"data: ") and b"\n" not in event for event in events):
                return [event[6:] for event in events]
        events = self._feed_lines(chunk)
        self.idle = not (self._parts or self._data or self._skipping or self._skip_lf or self._name)
        return events

    def flush(self) -> list[bytes]:
        """Return the data of an event whose lines are complete but whose blank line is missing."""
        return self._end_event() if self._data else []

    def _feed_lines(self, chunk: bytes) -> list[bytes]:
        if self._at_start:
            chunk = b"".join([*self._parts, chunk])
            self._parts.clear()
            self._parts_bytes = 0
            if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
                self._hold(chunk)
                return []
            self._at_start = False
            chunk = chunk.removeprefix(_BOM)
        if self._skip_lf and chunk:
            self._skip_lf = False
            chunk = chunk.removeprefix(b"\n")
        if b"\r" in chunk:
            self._skip_lf = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = chunk.split(b"\n")
        rest = lines.pop()
        events: list[bytes] = []
        for line in lines:
            self._hold(line)
            if self._skipping:
                self._skipping = False
                continue
            complete = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._parts_bytes = 0
            if complete:
                self._add_line(complete)
            elif self._data or self._name:
                events += self._end_event()
        self._hold(rest)
        return events

    def _hold(self, piece: bytes) -> None:
        """Keep a piece of the current line."""
        if self._skipping or not piece:
            return
        self._parts.append(piece)
        self._parts_bytes += len(piece)
        if self._parts_bytes > self._max_bytes:
            is_data = b"".join(self._parts[:8]).startswith(b"data:")
            self._parts.clear()
            self._parts_bytes = 0
            self._skipping = True
            self._drop(counted=is_data)

    def _add_line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            self._name = value
        if name != b"data":
            return
        self._data.append(value)
        self._data_bytes += len(value) + 1
        if self._data_bytes > self._max_bytes:
            self._end_event()
            self._drop(counted=True)

    def _end_event(self) -> list[bytes]:
        events = [self._data[0] if len(self._data) == 1 else b"\n".join(self._data)]
        if not self._data or self._name in _KEEP_ALIVE:
            events.clear()
        if self._name == b"error":
            if self.error is None:
                self.error = b"\n".join(self._data)
            events.clear()
        self._name = b""
        self._data.clear()
        self._data_bytes = 0
        return events

    def _drop(self, *, counted: bool) -> None:
        if not self._skip_long:
            raise LineTooLongError(f"line too long: over {self._max_bytes} bytes without an end")
        self.skipped += counted


# Raw fields accept any JSON, so tokens are counted even if a server sends a list where OpenAI sends
# a string. They also avoid building strings.
class _ObservedDelta(msgspec.Struct, gc=False):
    content: msgspec.Raw = _ABSENT
    reasoning_content: msgspec.Raw = _ABSENT
    reasoning: msgspec.Raw = _ABSENT
    refusal: msgspec.Raw = _ABSENT
    tool_calls: msgspec.Raw = _ABSENT


class _ObservedChoice(msgspec.Struct, gc=False):
    text: msgspec.Raw = _ABSENT
    token_ids: msgspec.Raw = _ABSENT
    delta: _ObservedDelta | None = None
    finish_reason: msgspec.Raw = _ABSENT


class _ObservedUsage(msgspec.Struct, gc=False):
    prompt_tokens: Any = None
    completion_tokens: int | None = None


class _ObservedEvent(msgspec.Struct, gc=False):
    choices: list[_ObservedChoice] | None = None
    usage: _ObservedUsage | None = None


class TokenObserver:
    """Times the tokens of a stream of completions.

    Each event with content, token ids, reasoning, a refusal or a tool call counts as one token. So
    does a later event with an empty text, because servers send one for a token whose text they hold
    back. In the event with the finish reason, an empty text is a token only if `usage` reports one
    more than the other events. The number of tokens itself is that of `usage`, if the stream
    reports it. Events that are not in OpenAI's form are ignored. A line above 256 KiB counts as one
    token and is not parsed.

    Most events of a stream differ only in their text. So an event that equals an earlier token,
    except for another text without quotes, escapes and control characters, is not parsed.

    Args:
        keep_gaps: True to record the time between consecutive tokens.

    Attributes:
        first_ns, last_ns: times of the first and the last token; None before the first token.
        gap_counts: number of times between consecutive tokens in each bucket of `BUCKETS_TPOT_S`,
            and above the last one.
        gaps_us: microseconds between consecutive tokens; empty if not recorded.
        prompt_tokens: prompt tokens in the stream's `usage`; 0 without it.
        finished: True if the stream reported its end.
        error: True if the stream reported an error.
        shed: True if the error event reported that the request was dropped because of load.
    """

    __slots__ = (
        "_decode",
        "_events",
        "_final_ns",
        "_keep_gaps",
        "_prefix",
        "_reader",
        "_suffix",
        "_usage_tokens",
        "error",
        "finished",
        "first_ns",
        "gap_counts",
        "gaps_us",
        "last_ns",
        "prompt_tokens",
        "shed",
    )

    def __init__(self, *, keep_gaps: bool = False) -> None:
        self._decode = _DECODER.decode
        self._events = 0
        self._usage_tokens = 0
        self._final_ns: int | None = None  # time of a last event with an empty text
        self._keep_gaps = keep_gaps
        # The bytes around the text of an event that is alone in its chunk; empty if not known.
        self._prefix = b""
        self._suffix = b""
        self._reader = SSEReader(_MAX_OBSERVED_BYTES, skip_long=True)
        self.gap_counts = [0] * (len(_GAP_BOUNDS_NS) + 1)
        self.gaps_us: list[int] = []
        self.prompt_tokens = 0
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.finished = False
        self.error = False
        self.shed = False

    @property
    def tokens(self) -> int:
        """Number of tokens so far, from the stream's `usage` or else from its events."""
        return self._usage_tokens or self._events

    @property
    def held_bytes(self) -> int:
        """Number of buffered bytes of an unfinished line."""
        return self._reader.held_bytes

    def feed(self, chunk: bytes, now_ns: int) -> None:
        """Observe the next bytes of the stream; on the hot path, once per read of every stream."""
        prefix, suffix = self._prefix, self._suffix
        if (
            prefix
            and chunk.startswith(prefix)
            and chunk.endswith(suffix)
            and self._reader.idle
            and _PLAIN.fullmatch(chunk, len(prefix), len(chunk) - len(suffix))
        ):
            # As in `_token`, without a call.
            self._events += 1
            if self.last_ns is not None:
                gap_ns = now_ns - self.last_ns
                self.gap_counts[bisect_left(_GAP_BOUNDS_NS, gap_ns)] += 1
                if self._keep_gaps:
                    self.gaps_us.append(gap_ns // NS_PER_US)
            self.last_ns = now_ns
            return
        skipped = self._reader.skipped
        for data in self._reader.feed(chunk):
            self._event(data, now_ns)
        if self._reader.error is not None and not self.error:
            named = self._reader.error
            self._fail(read_error(named) or named)
        if self._reader.skipped != skipped:
            self._token(now_ns)

    def end(self, now_ns: int) -> None:
        """Observe the end of the stream, and its last event if that event lacks the blank line."""
        for data in self._reader.flush():
            self._event(data, now_ns)

    def _event(self, data: bytes, now_ns: int) -> None:
        try:
            event = self._decode(data)
        except (ValueError, RecursionError):
            if data.strip() == b"[DONE]":
                self.finished = True
            elif (valid := without_nan(data)) is not None:
                self._event(valid, now_ns)
            return
        if event.choices:
            is_last = False
            for choice in event.choices:
                if _is_filled(choice.finish_reason):
                    is_last = self.finished = True
                    if is_failure(bytes(choice.finish_reason).decode(errors="replace").strip('"')):
                        self._fail(data)
            if any(map(_has_token, event.choices)):
                self._token(now_ns)
                self._learn(data, event)
            elif self.last_ns is not None and any(map(_has_empty_text, event.choices)):
                if is_last:
                    self._final_ns = now_ns
                else:
                    self._token(now_ns)
        if event.usage is not None:
            self._take_usage(event.usage)
        if b'"error' in data or (event.choices is None and event.usage is None):
            error = read_error(data)
            if error is not None:
                self._fail(error)

    def _take_usage(self, usage: _ObservedUsage) -> None:
        self._usage_tokens = usage.completion_tokens or self._usage_tokens
        # An event with a finish reason and an empty text is the last token, or none.
        final_ns, self._final_ns = self._final_ns, None
        if final_ns is not None and self._usage_tokens == self._events + 1:
            self._token(max(final_ns, self.last_ns or 0))
        if isinstance(usage.prompt_tokens, int):
            self.prompt_tokens = usage.prompt_tokens

    def _learn(self, data: bytes, event: _ObservedEvent) -> None:
        """Store the bytes around the text of an event that is nothing but one token."""
        self._prefix = b""
        assert event.choices, "the event has a token"
        choice = event.choices[0]
        text = bytes(choice.text if choice.delta is None else choice.delta.content)
        if (
            len(event.choices) == 1
            and event.usage is None
            and not _is_filled(choice.finish_reason)
            and text.startswith(b'"')
            and len(text) > 2
            and data.count(text) == 1
            and b'"error' not in data
            and b"\n" not in data
        ):
            prefix, _, suffix = data.partition(text)
            self._prefix = b"data: " + prefix + b'"'
            self._suffix = b'"' + suffix + b"\n\n"

    def _fail(self, error: bytes) -> None:
        self.error = True
        self.shed = is_overload(error)

    def _token(self, now_ns: int) -> None:
        self._events += 1
        if self.last_ns is None:
            self.first_ns = now_ns
        else:
            gap_ns = now_ns - self.last_ns
            self.gap_counts[bisect_left(_GAP_BOUNDS_NS, gap_ns)] += 1
            if self._keep_gaps:
                self.gaps_us.append(gap_ns // NS_PER_US)
        self.last_ns = now_ns


_DECODER: Final = msgspec.json.Decoder(_ObservedEvent)


def without_nan(data: bytes) -> bytes | None:
    """Return JSON with null in place of NaN and Infinity, which Python's encoder writes.

    None if `data` has neither, or is not JSON apart from them.
    """
    if b"NaN" not in data and b"Infinity" not in data:
        return None
    found = False

    def null(_constant: str) -> None:
        nonlocal found
        found = True

    try:
        value = json.loads(data, parse_constant=null)
        return json.dumps(value, allow_nan=False).encode() if found else None
    except (ValueError, RecursionError):
        return None


def _is_filled(raw: msgspec.Raw) -> bool:
    """True if a field is neither absent, nor null, nor an empty string, list or object."""
    return len(raw) > 2 and raw != _NULL


def _has_token(choice: _ObservedChoice) -> bool:
    if _is_filled(choice.text) or _is_filled(choice.token_ids):
        return True
    delta = choice.delta
    return delta is not None and (
        _is_filled(delta.content)
        or _is_filled(delta.reasoning_content)
        or _is_filled(delta.reasoning)
        or _is_filled(delta.tool_calls)
        or _is_filled(delta.refusal)
    )


def _has_empty_text(choice: _ObservedChoice) -> bool:
    delta = choice.delta
    return choice.text == _EMPTY_TEXT or (
        delta is not None
        and _EMPTY_TEXT in (delta.content, delta.reasoning_content, delta.reasoning)
    )
