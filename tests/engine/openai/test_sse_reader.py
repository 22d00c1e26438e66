"""The reader of server-sent events: the standard's rules, any chunks, bounded memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_engine.openai.sse import LineTooLongError, SSEReader

STREAMS = {
    "the usual form": (b'data: {"a":1}\n\ndata: [DONE]\n\n', [b'{"a":1}', b"[DONE]"]),
    "crlf": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    "cr alone": (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    "mixed line ends": (b"data: a\r\n\ndata: b\n\r\n", [b"a", b"b"]),
    "no space after the colon": (b"data:a\n\n", [b"a"]),
    "only one space is removed": (b"data:  a\n\n", [b" a"]),
    "several lines are joined": (b"data: a\ndata: b\n\n", [b"a\nb"]),
    "comments and other fields": (b": hi\nevent: x\nid: 7\ndata: a\nretry: 1\n\n", [b"a"]),
    "a field without a colon": (b"data\n\n", [b""]),
    "blank lines between": (b"\n\n\ndata: a\n\n\n\n", [b"a"]),
    "a byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    "another field": (b"database: a\n\ndata: b\n\n", [b"b"]),
    "an incomplete event": (b"data: a\n\ndata: b\n", [b"a"]),
    "nothing": (b"", []),
}


def parse(pieces: list[bytes], limit: int = 1 << 20) -> list[bytes]:
    parser = SSEReader(limit)
    return [event for piece in pieces for event in parser.feed(piece)]


def split(stream: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(c % (len(stream) + 1) for c in cuts), len(stream)]
    return [stream[a:b] for a, b in pairwise(at)]


@pytest.mark.parametrize(("stream", "events"), STREAMS.values(), ids=STREAMS)
def test_events_are_read_as_in_the_standard(stream: bytes, events: list[bytes]) -> None:
    assert parse([stream]) == events


@pytest.mark.parametrize(("stream", "events"), STREAMS.values(), ids=STREAMS)
def test_a_stream_read_byte_by_byte_gives_the_same_events(
    stream: bytes, events: list[bytes]
) -> None:
    assert parse([stream[i : i + 1] for i in range(len(stream))]) == events


ERRORS = {
    "with data": (b"event: error\ndata: a\n\ndata: b\n\n", b"a", [b"b"]),
    "no space": (b"event:error\ndata:a\n\n", b"a", []),
    "the name after the data": (b"data: a\nevent: error\n\n", b"a", []),
    "without data": (b"event: error\n\ndata: b\n\n", b"", [b"b"]),
    "the first of two": (b"event: error\ndata: a\n\nevent: error\ndata: b\n\n", b"a", []),
    "crlf": (b"event: error\r\ndata: a\r\n\r\n", b"a", []),
    "renamed": (b"event: error\nevent: x\ndata: a\n\n", None, [b"a"]),
    "another name": (b"event: errors\ndata: a\n\n", None, [b"a"]),
    "unfinished": (b"event: error\ndata: a\n", None, []),
    "the name ends with its event": (b"event: error\n\ndata: a\n\n", b"", [b"a"]),
}


@pytest.mark.parametrize(("stream", "error", "events"), ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("size", [1, 7, 13, 100])
def test_an_event_named_error_is_kept_apart(
    stream: bytes, error: bytes | None, events: list[bytes], size: int
) -> None:
    parser = SSEReader()
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert [event for piece in pieces for event in parser.feed(piece)] == events
    assert parser.error == error


_PARTS = st.sampled_from(
    [
        b"event: error\n",
        b"data: ",
        b"data:",
        b'{"x":1}',
        b"\n",
        b"\r",
        b"\r\n",
        b"\n\n",
        b": c",
        b"\xef\xbb\xbf",
        b"z",
    ]
)


@given(st.lists(_PARTS, max_size=30).map(b"".join), st.lists(st.integers(0, 300), max_size=12))
def test_the_result_does_not_depend_on_the_chunks(stream: bytes, cuts: list[int]) -> None:
    whole, pieces = SSEReader(), SSEReader()
    expected = whole.feed(stream)
    assert [e for piece in split(stream, cuts) for e in pieces.feed(piece)] == expected
    assert pieces.inside_event == whole.inside_event
    assert pieces.error == whole.error


@given(
    st.integers(1, 40),
    st.booleans(),
    st.lists(st.integers(0, 300), max_size=5),
)
def test_a_line_above_the_limit_is_rejected_for_any_chunks(
    length: int, ended: bool, cuts: list[int]
) -> None:
    stream = b"data: a\n\n" + b"x" * length + (b"\n\n" if ended else b"")
    pieces = split(stream, cuts)
    if length <= 20:
        assert parse(pieces, 20) == [b"a"]
    else:
        with pytest.raises(LineTooLongError):
            parse(pieces, 20)


def test_the_lines_of_one_event_share_the_limit() -> None:
    with pytest.raises(LineTooLongError):
        parse([b"data: 0123456789\n"] * 3, 30)


def test_an_endless_line_is_rejected_at_the_limit() -> None:
    parser = SSEReader()
    piece = b"x" * 65_536
    for _ in range(16):
        parser.feed(piece)
    with pytest.raises(LineTooLongError):
        parser.feed(piece)


@pytest.mark.parametrize(
    ("stream", "inside"),
    [(b"data: a\n\n", False), (b"data: a\n", True), (b"dat", True), (b": comment\n", False)],
    ids=["complete", "half", "half a line", "comment"],
)
def test_an_unfinished_event_is_detected(stream: bytes, inside: bool) -> None:
    parser = SSEReader()
    parser.feed(stream)
    assert parser.inside_event is inside
