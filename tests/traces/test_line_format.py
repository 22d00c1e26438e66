"""Formats of text lines: the notations of nginx and Envoy, and time linear in the line."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_traces.importers.line_format import parse_line_format


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        pytest.param(
            '$remote_addr - $remote_user [$time_local] "$request" $status',
            '10.0.0.1 - - [16/Nov/2023:18:15:46 +0000] "POST /v1 HTTP/1.1" 200',
            {
                "remote_addr": "10.0.0.1",
                "remote_user": None,
                "time_local": "16/Nov/2023:18:15:46 +0000",
                "request": "POST /v1 HTTP/1.1",
                "status": "200",
            },
            id="nginx",
        ),
        pytest.param("${a}b$c", "1b2", {"a": "1", "c": "2"}, id="nginx braces"),
        pytest.param(
            '[%START_TIME%] "%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH):80%" %DURATION%\\n',
            '[2016-04-15T20:17:00.310Z] "POST /api/v1/locations" 226',
            {
                "START_TIME": "2016-04-15T20:17:00.310Z",
                "REQ(:METHOD)": "POST",
                "REQ(X-ENVOY-ORIGINAL-PATH?:PATH)": "/api/v1/locations",
                "DURATION": "226",
            },
            id="Envoy",
        ),
        pytest.param("{a.b}|{c}", "x y|", {"a.b": "x y", "c": None}, id="ours"),
        pytest.param("in={in} out={out}.", "in=5 out=7.5.", {"in": "5", "out": "7.5"}, id="last"),
        pytest.param("costs 5$ {a}", "costs 5$ 1", {"a": "1"}, id="a dollar alone"),
    ],
)
def test_a_line_is_split_at_the_literals(
    text: str, line: str, expected: dict[str, str | None]
) -> None:
    assert parse_line_format(text).match(line) == expected


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("x 200", "it does not start with '['"),
        ("[now 200", "there is no '] ' after the field time"),
        ("[now] 200", "there is no '.' after the field status"),
    ],
)
def test_a_line_that_does_not_match_names_the_field(line: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        parse_line_format("[{time}] {status}.").match(line)
    assert str(raised.value) == problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has 0 fields"),
        ("no fields", "has 0 fields"),
        ("{a} {a}", "names the field a twice"),
        ("{a}{b}", "has no text between the fields a and b"),
        (" ".join(f"{{f{at}}}" for at in range(300)), "has 300 fields"),
        ("{a} " + "x" * 9000, "is longer than 8,192 characters"),
    ],
)
def test_an_invalid_format_is_rejected(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        parse_line_format(text)
    assert problem in str(raised.value)


def test_a_hostile_line_costs_time_in_proportion_to_its_length() -> None:
    line_format = parse_line_format(" ".join(f"{{f{at}}} a" for at in range(100)))
    start = time.process_time()
    with pytest.raises(ValueError, match="there is no"):
        line_format.match(" a" * 99 + "a" * 4_000_000)
    assert time.process_time() - start < 1


FIELD = st.text("abc", min_size=1, max_size=5)
LITERAL = st.text("-;: ", min_size=1, max_size=3)


@given(
    values=st.lists(FIELD, min_size=1, max_size=8),
    literals=st.lists(LITERAL, min_size=9, max_size=9),
)
def test_a_written_line_is_read_back(values: list[str], literals: list[str]) -> None:
    names = [f"f{at}" for at in range(len(values))]
    text, line = "<", "<"
    for name, value, literal in zip(names, values, literals, strict=False):
        text += f"{{{name}}}{literal}"
        line += f"{value}{literal}"
    text, line = text + ">", line + ">"
    assert parse_line_format(text).match(line) == dict(zip(names, values, strict=True))
