"""Stop strings are found across pieces of text, and never sent in part."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_engine.text.stop_matcher import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    sent = ""
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        sent += text
        if stopped:
            return sent, True
    return sent + matcher.rest(), False


@pytest.mark.parametrize(
    ("stops", "pieces", "sent", "stopped"),
    [
        pytest.param(["x"], ["ab", "cd"], "abcd", False, id="no match"),
        pytest.param(["bc"], ["ab", "cd"], "a", True, id="across a boundary"),
        pytest.param(["abcd"], ["a", "b", "c", "d"], "", True, id="over four pieces"),
        pytest.param(["ab!"], ["ab", "ab", "!z"], "ab", True, id="a false start"),
        pytest.param(["aab"], ["aa", "ab"], "a", True, id="an overlapping false start"),
        pytest.param(["zz"], ["abz"], "abz", False, id="held back, then sent"),
        pytest.param(["cd", "b"], ["abcd"], "a", True, id="the earliest applies"),
        pytest.param(["b", "ab"], ["xab"], "x", True, id="the longer of two that end together"),
        pytest.param(["é"], ["caf", "é!"], "caf", True, id="not ASCII"),
    ],
)
def test_a_stop_string_ends_the_text(
    stops: list[str], pieces: list[str], sent: str, stopped: bool
) -> None:
    assert run(stops, pieces) == (sent, stopped)


_STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(_STOPS, st.lists(st.text("abc", max_size=4), max_size=12))
def test_the_result_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    assert run(stops, pieces) == run(stops, [text]) == run(stops, list(text))


@given(_STOPS, st.lists(st.text("abc", max_size=4), max_size=12))
def test_the_sent_text_contains_no_stop_string_and_is_complete(
    stops: list[str], pieces: list[str]
) -> None:
    sent, stopped = run(stops, pieces)
    assert not any(stop in sent for stop in stops)
    text = "".join(pieces)
    assert text.startswith(sent)
    assert stopped or sent == text


@given(_STOPS, st.text("abc", max_size=30))
def test_the_stop_string_that_ends_first_applies(stops: list[str], text: str) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = (text[: min(ends)[1]], True) if ends else (text, False)
    assert run(stops, list(text)) == expected


def test_repeated_beginnings_of_many_stop_strings_cost_little() -> None:
    stops = ["a" * 255 + chr(ord("b") + at) for at in range(16)]
    matcher = StopMatcher(stops)
    start = time.process_time()
    sent = "".join(matcher.feed("a")[0] for _ in range(20_000))
    assert time.process_time() - start < 10
    assert sent == "a" * (20_000 - 255)
    assert matcher.feed("c") == ("", True)
