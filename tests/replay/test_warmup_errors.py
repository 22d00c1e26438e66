"""Errors during the warm-up do not change a verdict, and are named; later errors do change it."""

from __future__ import annotations

import html
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from tests.builders.records import finished_request
from tests.replay.compare.recorded import CHAT
from tests.replay.conftest import INFO

from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.verdict import Reason, VerdictKind
from goodput_core.units import NS_PER_S
from goodput_replay.report.run_report import render
from goodput_replay.runs.folder import RunWriter
from goodput_replay.runs.terminal import print_summary

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_replay.runs.summary import Summary

WARMUP, JUDGED = 40, 1200


def record_run(folder: Path, *, failed: range, status: int = 401) -> Summary:
    """Record two minutes after a warm-up of four seconds.

    Args:
        folder: the run's folder.
        failed: numbers of the failed requests, the warm-up included.
        status: their status.
    """
    info = replace(
        INFO,
        slo=CHAT,
        window_start_ns=WARMUP // 10 * NS_PER_S,
        window_ns=JUDGED // 10 * NS_PER_S,
        rows_planned=JUDGED,
        warmup_rows=WARMUP,
    )
    with RunWriter(folder, slo=CHAT) as writer:
        for number in range(WARMUP + JUDGED):
            record = _record(number, status if number in failed else None)
            writer.append(record, warmup=number < WARMUP)
        return writer.finish(info)


def _record(number: int, status: int | None) -> RequestRecord:
    name, at_ns = f"r{number:05}", number * NS_PER_S // 10
    if status is None:
        return finished_request(request_id=name, scheduled_ns=at_ns)
    return finished_request(
        request_id=name,
        scheduled_ns=at_ns,
        outcome=Outcome.ERROR,
        status=status,
        detail=f"HTTP {status}: no",
        first_token_ns=None,
        last_token_ns=None,
        output_tokens=0,
    )


def shown(summary: Summary) -> str:
    text = StringIO()
    print_summary(summary, Console(file=text, width=200))
    return text.getvalue()


@pytest.mark.parametrize("status", [401, 500])
def test_errors_of_the_warmup_alone_leave_a_pass_and_are_named(tmp_path: Path, status: int) -> None:
    summary = record_run(tmp_path, failed=range(30), status=status)
    assert (summary.verdict.kind, summary.validity.valid) == (VerdictKind.PASS, True)
    assert (summary.validity.client_errors, summary.errors) == (0, ())
    sentence = f"30 of 40 requests failed, most often with 'HTTP {status}: no', so the service"
    assert f"warm-up: {sentence}" in shown(summary)
    assert f"Warm-up: {sentence}" in html.unescape(render(tmp_path))


def test_a_clean_warmup_does_not_excuse_errors_of_the_client(tmp_path: Path) -> None:
    summary = record_run(tmp_path, failed=range(WARMUP, WARMUP + JUDGED))
    assert (summary.verdict.kind, summary.verdict.reason) == (
        VerdictKind.INVALID,
        Reason.CLIENT_ERROR,
    )
    assert summary.window.warmup_failed == 0
    assert "warm-up:" not in shown(summary)
    assert "Warm-up:" not in render(tmp_path)
    assert "1,200 ×  HTTP 401: no" in shown(summary)


def test_a_key_that_expires_with_the_warmup_is_named_in_both(tmp_path: Path) -> None:
    """A FAIL by 500s holds; the same failures with 401 say nothing about the service."""
    failed = range(20, WARMUP + JUDGED // 2)
    summary = record_run(tmp_path / "key", failed=failed)
    assert summary.verdict.reason is Reason.CLIENT_ERROR
    assert summary.window.warmup_failed == 20
    assert "warm-up: 20 of 40 requests failed" in shown(summary)
    failing = record_run(tmp_path / "service", failed=failed, status=500)
    assert failing.verdict.kind is VerdictKind.FAIL


def test_the_most_frequent_error_of_the_warmup_is_that_of_the_warmup(tmp_path: Path) -> None:
    with RunWriter(tmp_path, slo=CHAT) as writer:
        for number, status in enumerate([500, 500, 401, None, 503, 503, 503]):
            writer.append(_record(number, status), warmup=number < 4)
        summary = writer.finish(replace(INFO, slo=CHAT, rows_planned=3, warmup_rows=4))
    assert summary.window.warmup_failed == 3
    assert summary.window.warmup_error == "HTTP 500: no"
