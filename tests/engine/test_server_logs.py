"""A log collector gets one line per event, whatever is in it."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import pytest

from goodput_engine.logs import LineFormatter, configure_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def stderr_of_a_process(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Logging as in a command's process, for this test."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []
    configure_logging()
    yield lambda: capsys.readouterr().err
    root.handlers = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("error", "lines"), [(ConnectionResetError("it left"), 0), (RuntimeError("ours"), 1)], ids=str
)
def test_a_client_that_leaves_is_no_event(
    error: Exception, lines: int, stderr_of_a_process: Callable[[], str]
) -> None:
    logging.getLogger("aiohttp.server").error("Error handling request", exc_info=error)
    assert len(stderr_of_a_process().splitlines()) == lines


def line(**extra: object) -> str:
    logger = logging.getLogger("test")
    record = logger.makeRecord("test", logging.INFO, "f", 1, "listening", (), None, extra=extra)
    return LineFormatter().format(record)


def test_fields_follow_the_event_and_only_odd_values_are_quoted() -> None:
    text = line(url="http://x:1", in_flight=3, detail='it said "no"', empty="")
    assert text.endswith(
        ' INFO listening url=http://x:1 in_flight=3 detail="it said \\"no\\"" empty=""'
    )


def test_neither_a_line_break_nor_a_traceback_makes_two_lines() -> None:
    assert "\n" not in line(detail="two\nlines")
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", None, sys.exc_info())
    text = LineFormatter().format(record)
    assert "\n" not in text
    assert "ValueError: no" in text
