"""Each event is one line, with any content."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from goodput_engine.logs import LineFormatter


@pytest.mark.parametrize(
    ("error", "lines"),
    [("ConnectionResetError", 0), ("RuntimeError", 1)],
    ids=["of the client", "of the engine"],
)
def test_a_disconnected_client_is_not_logged(error: str, lines: int) -> None:
    program = (
        "import logging; from goodput_engine.logs import configure_logging; configure_logging(); "
        f"logging.getLogger('aiohttp.server').error('failed', exc_info={error}('x'))"
    )
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, check=True)
    assert len(done.stderr.splitlines()) == lines


def line(**extra: object) -> str:
    logger = logging.getLogger("test")
    record = logger.makeRecord("test", logging.INFO, "f", 1, "listening", (), None, extra=extra)
    return LineFormatter().format(record)


def test_fields_follow_the_event_and_only_special_values_are_quoted() -> None:
    text = line(url="http://x:1", in_flight=3, detail='it said "no"', empty="")
    assert text.endswith(
        ' INFO listening url=http://x:1 in_flight=3 detail="it said \\"no\\"" empty=""'
    )


def test_line_breaks_and_tracebacks_are_escaped_to_one_line() -> None:
    assert "\n" not in line(detail="two\nlines")
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", None, sys.exc_info())
    text = LineFormatter().format(record)
    assert "\n" not in text
    assert "ValueError: no" in text
