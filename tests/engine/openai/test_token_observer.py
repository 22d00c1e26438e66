"""The observer of streams: the same result for any chunks, and bounded memory."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_engine.openai.sse import TokenObserver, without_nan


def completion(text: str, finish: str = "null") -> bytes:
    return b'data: {"choices":[{"text":"%s","finish_reason":%s}]}\n\n' % (
        text.encode(),
        finish.encode(),
    )


def chat(delta: str) -> bytes:
    return b'data: {"choices":[{"delta":%s,"finish_reason":null}]}\n\n' % delta.encode()


STREAM = (
    b": hello\n\n"
    + chat('{"role":"assistant","content":""}')
    + chat('{"content":"a"}')
    + b"event: x\r\ndata:" + chat('{"content":"b"}')[6:-2] + b"\r\n\r\n"
    + b"data: not json\n\n"
    + chat('{"content":"c"}')
    + completion("", '"stop"')
    + b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
    + b"data: [DONE]\n\n"
)  # fmt: skip


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_the_chunks_change_only_the_times(cuts: list[int]) -> None:
    observer = TokenObserver(keep_gaps=True)
    edges = [0, *sorted(cuts), len(STREAM)]
    for now_ns, (a, b) in enumerate(itertools.pairwise(edges)):
        if a < b:
            observer.feed(STREAM[a:b], now_ns * 1000)
    assert observer.tokens == 3
    assert observer.finished
    assert not observer.error
    assert observer.first_ns is not None
    assert observer.last_ns is not None
    assert len(observer.gaps_us) == 2
    assert sum(observer.gaps_us) == (observer.last_ns - observer.first_ns) // 1000


@st.composite
def events(draw: st.DrawFn) -> bytes:
    """An event of a stream: usually another text in the same form, sometimes something else."""
    text = draw(st.sampled_from(["a", "b c", "", 'quote"', "back\\slash", "line\n", "text", "é"]))
    choice: dict[str, object] = {"index": 0, "text": text}
    rare = draw(st.integers(0, 7))
    event: dict[str, object] = {"id": draw(st.sampled_from(["1", "1", "a"])), "choices": [choice]}
    if rare == 0:
        choice["finish_reason"] = draw(st.sampled_from(["stop", "error", None]))
    elif rare == 1:
        event["usage"] = {"completion_tokens": draw(st.integers(0, 9))}
    elif rare == 2:
        event = {"error": {"message": text, "code": draw(st.sampled_from([429, 500]))}}
    elif rare == 3:
        choice["token_ids"] = [1]
    elif rare == 4:
        event["choices"] = [choice, choice]
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
    if rare == 5:
        data = data[:-1]
    return b"data: " + data + b"\n\n"


@given(stream=st.lists(events(), max_size=12))
def test_unparsed_events_have_the_result_of_parsed_ones(stream: list[bytes]) -> None:
    fast, slow = TokenObserver(keep_gaps=True), TokenObserver(keep_gaps=True)
    for number, event in enumerate(stream):
        fast.feed(event, number * 1000)
        # An event that arrives in two parts is always parsed.
        slow.feed(event[:9], number * 1000)
        slow.feed(event[9:], number * 1000)
    fields = ("tokens", "first_ns", "last_ns", "gaps_us", "finished", "error", "shed")
    assert [getattr(fast, f) for f in fields] == [getattr(slow, f) for f in fields]


@pytest.mark.parametrize(
    ("event", "tokens"),
    [
        pytest.param(completion("a"), 1, id="text"),
        pytest.param(completion(""), 0, id="empty text"),
        pytest.param(b'data: {"choices":[{"text":"","token_ids":[7]}]}\n\n', 1, id="token ids"),
        pytest.param(b'data: {"choices":[{"text":"","token_ids":[]}]}\n\n', 0, id="no token ids"),
        pytest.param(chat('{"content":"a"}'), 1, id="content"),
        pytest.param(chat('{"content":null}'), 0, id="null content"),
        pytest.param(chat('{"role":"assistant"}'), 0, id="role"),
        pytest.param(chat('{"reasoning_content":"hm"}'), 1, id="reasoning"),
        pytest.param(chat('{"tool_calls":[{"index":0}]}'), 1, id="tool call"),
        pytest.param(chat('{"tool_calls":[]}'), 0, id="no tool call"),
        pytest.param(chat("null"), 0, id="null delta"),
        pytest.param(b'data: {"choices":{}}\n\n', 0, id="choices of another type"),
        pytest.param(b'data: {"choices":null}\n\n', 0, id="null choices"),
        pytest.param(b"data: [1,2]\n\n", 0, id="not an object"),
        pytest.param(b"data: \xff\xfe\n\n", 0, id="not text"),
        pytest.param(b"data:\n\n\n\ndata\n\n", 0, id="nothing"),
        pytest.param(b'data:{"choices":[{"text":"a"}]}\n\n', 1, id="no space"),
        pytest.param(b'event: a\ndata: {"choices":[{"text":"a"}]}\n\n', 1, id="other fields"),
    ],
)
def test_a_token_is_an_event_with_content(event: bytes, tokens: int) -> None:
    observer = TokenObserver()
    observer.feed(event, 7)
    assert observer.tokens == tokens
    assert observer.first_ns == (7 if tokens else None)


@pytest.mark.parametrize(
    ("held", "counted"),
    [
        pytest.param(completion(""), True, id="text"),
        pytest.param(chat('{"content":""}'), True, id="content"),
        pytest.param(chat('{"content":null,"reasoning_content":""}'), True, id="reasoning"),
        pytest.param(chat("{}"), False, id="nothing"),
        pytest.param(chat('{"content":null}'), False, id="null"),
        pytest.param(completion("", '"stop"'), False, id="the end"),
    ],
)
def test_an_empty_text_after_a_token_is_a_token(held: bytes, counted: bool) -> None:
    observer = TokenObserver(keep_gaps=True)
    shown = completion("a") if b'"text"' in held else chat('{"content":"a"}')
    for number, event in enumerate((held, shown, held, shown), 1):
        observer.feed(event, number * 1_000)
    assert observer.first_ns == 2_000, "TTFT is the time of the first token with text"
    assert observer.gaps_us == ([1, 1] if counted else [2])
    assert observer.tokens == len(observer.gaps_us) + 1


@pytest.mark.parametrize(
    ("usage", "gaps_us"),
    [
        pytest.param(b"", [1], id="no usage"),
        pytest.param(b'"completion_tokens":2', [1], id="only the end"),
        pytest.param(b'"completion_tokens":3', [1, 5], id="the last token"),
        pytest.param(b'"completion_tokens":4', [1], id="several tokens an event"),
    ],
)
def test_an_empty_text_at_the_end_is_a_token_if_the_usage_has_one_more(
    usage: bytes, gaps_us: list[int]
) -> None:
    observer = TokenObserver(keep_gaps=True)
    observer.feed(completion("a"), 1_000)
    observer.feed(completion("b"), 2_000)
    observer.feed(completion("", '"stop"'), 7_000)
    observer.feed(b'data: {"choices":[],"usage":{%b}}\n\n' % usage, 9_000)
    assert observer.gaps_us == gaps_us
    assert observer.last_ns == 2_000 + sum(gaps_us[1:]) * 1_000


def test_events_of_one_chunk_have_the_same_time() -> None:
    observer = TokenObserver(keep_gaps=True)
    observer.feed(completion("a"), 1_000)
    observer.feed(completion("b") * 3, 5_000)
    assert observer.tokens == 4
    assert (observer.first_ns, observer.last_ns) == (1_000, 5_000)
    assert observer.gaps_us == [4, 0, 0]


def test_usage_overrides_the_number_of_events() -> None:
    observer = TokenObserver()
    observer.feed(completion("two words"), 1)
    observer.feed(b'data: {"choices":[],"usage":{"completion_tokens":9}}\n\n', 2)
    assert observer.tokens == 9


def test_an_error_event_is_detected() -> None:
    observer = TokenObserver()
    observer.feed(b'data: {"error":{"message":"no"}}\n\n', 1)
    assert observer.error
    fine = TokenObserver()
    fine.feed(b'data: {"error":null,"choices":[]}\n\n', 1)
    assert not fine.error


@pytest.mark.parametrize(
    ("event", "shed"),
    [
        pytest.param(b'data: {"object":"error","message":"no"}\n\n', False, id="object"),
        pytest.param(b'data: {"object": "error", "code": 429}\n\n', True, id="object, overload"),
        pytest.param(b"event: error\ndata: no\n\n", False, id="name"),
        pytest.param(b'event: error\ndata: {"error":{"code":429}}\n\n', True, id="name, overload"),
        pytest.param(completion("", '"error"'), False, id="finish reason error"),
        pytest.param(completion("a", '"abort"'), False, id="finish reason abort"),
        pytest.param(completion("", '"error: oom"'), False, id="finish reason error: oom"),
        pytest.param(b'data: {"choices":[{"error":{"code":"429"}}]}\n\n', True, id="choice"),
        pytest.param(b'data: {"detail":"lost"}\n\n', False, id="detail"),
        pytest.param(b'data: {"errors":["lost"]}\n\n', False, id="errors"),
        pytest.param(b'data: {"message":"busy","code":429}\n\n', True, id="message and code"),
        pytest.param(b'data: {"error":"lost","x":NaN}\n\n', False, id="NaN"),
    ],
)
def test_every_form_of_an_error_in_a_stream_is_detected(event: bytes, shed: bool) -> None:
    observer = TokenObserver()
    observer.feed(completion("a"), 1)
    observer.feed(event + completion("", '"stop"') + b"data: [DONE]\n\n", 2)
    assert observer.error
    assert observer.shed == shed


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(b"event: ping\ndata: x\n\n", id="event ping"),
        pytest.param(b'data: {"type":"ping"}\n\n', id="type ping"),
        pytest.param(b"data: {}\n\n", id="empty"),
        pytest.param(b'data: {"timings":{}}\n\n', id="timings"),
        pytest.param(b'data: {"choices":[],"prompt_filter_results":[]}\n\n', id="Azure"),
        pytest.param(b'data: {"object":"chat.completion.chunk"}\n\n', id="no choices"),
    ],
)
def test_a_harmless_event_is_no_error(event: bytes) -> None:
    observer = TokenObserver()
    observer.feed(event + completion("a") + event + completion("", '"stop"') + event, 1)
    assert observer.finished
    assert not observer.error
    assert observer.tokens == 1


def test_an_event_with_nan_counts_as_a_token() -> None:
    observer = TokenObserver()
    observer.feed(b'data: {"choices":[{"text":"a","logprob":NaN,"least":-Infinity}]}\n\n', 1)
    assert observer.tokens == 1


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_only_nan_and_infinity_become_null(value: object) -> None:
    def finite(one: object) -> object:
        if isinstance(one, float):
            return one if math.isfinite(one) else None
        if isinstance(one, list):
            return [finite(item) for item in one]
        return {k: finite(v) for k, v in one.items()} if isinstance(one, dict) else one

    data = json.dumps(value).encode()
    valid = without_nan(data)
    assert json.loads(data if valid is None else valid) == finite(value)
    assert (valid is None) == (finite(value) == value)


def test_a_text_about_errors_is_no_error() -> None:
    observer = TokenObserver()
    observer.feed(completion(r"\"error\": {\"object\": \"error\"}") + completion("", '"stop"'), 1)
    assert not observer.error
    assert observer.finished


@pytest.mark.parametrize(
    ("error", "shed"),
    [
        pytest.param('{"type":"rate_limit_error"}', True, id="type"),
        pytest.param('{"code":"rate_limit_exceeded"}', True, id="code"),
        pytest.param('{"code":429}', True, id="status as a number"),
        pytest.param('{"code":"429"}', True, id="status as text"),
        pytest.param('{"type":"server_error","code":503}', False, id="server error"),
        pytest.param('{"code":["rate_limit_exceeded"]}', False, id="code of another type"),
        pytest.param('"rate_limit_error"', False, id="not an object"),
    ],
)
def test_an_error_event_with_the_meaning_of_429_is_detected(error: str, shed: bool) -> None:
    observer = TokenObserver()
    observer.feed(completion("a"), 1)
    observer.feed(f'data: {{"error":{error}}}\n\n'.encode(), 2)
    assert observer.error
    assert observer.shed == shed


@pytest.mark.parametrize("size", [1_000, 65_536], ids=["small chunks", "large chunks"])
def test_an_endless_line_is_one_token_and_is_not_stored(size: int) -> None:
    observer = TokenObserver()
    observer.feed(b'data: {"choices":[{"text":"', 1)
    for now_ns in range(2_000_000 // size):
        observer.feed(b"x" * size, now_ns)
    assert observer.tokens == 1
    assert observer.held_bytes == 0
    observer.feed(b'"}]}\n\n' + completion("a") + b"data: [DONE]\n\n", 9)
    assert observer.tokens == 2
    assert observer.finished


def test_an_endless_comment_is_not_a_token() -> None:
    observer = TokenObserver()
    for _ in range(10):
        observer.feed(b":" + b"x" * 65_536, 1)
    assert observer.tokens == 0
