"""A run's summary on the terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from tests.replay.conftest import write_run

from goodput_core.slo.judging import MissReason
from goodput_core.slo.verdict import Reason, VerdictKind
from goodput_replay.runs.summary import ErrorSummary, LengthPinning
from goodput_replay.runs.terminal import print_summary

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.replay.conftest import SyntheticRun

    from goodput_replay.runs.summary import Summary


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory, synthetic_run: SyntheticRun) -> Summary:
    folder = tmp_path_factory.mktemp("view")
    return write_run(folder, synthetic_run.info, synthetic_run.records)


def _printed(summary: Summary, *, width: int = 80, folder: Path | None = None) -> str:
    sink = io.StringIO()
    print_summary(summary, Console(file=sink, width=width), folder=folder)
    return sink.getvalue()


@pytest.mark.golden
@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_of_fixed_records_do_not_change(
    summary: Summary, golden: Callable[[str, str], None], width: int
) -> None:
    golden(f"run_view_{width}.txt", _printed(summary, width=width))


def test_a_pipe_gets_no_colours(summary: Summary) -> None:
    assert "\x1b" not in _printed(summary)


def test_eighty_columns_truncate_no_cell(summary: Summary) -> None:
    unsure = replace(summary.classes[0], verdict=VerdictKind.INCONCLUSIVE)
    text = _printed(replace(summary, classes=(unsure, *summary.classes[1:])))
    assert "INCONCLUSIVE" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_invalid_run_shows_no_verdict_of_a_class(summary: Summary) -> None:
    verdict = replace(
        summary.verdict,
        kind=VerdictKind.INVALID,
        reason=Reason.CLIENT_LAG,
        sentence="The run is invalid: the client sent late.",
    )
    validity = replace(summary.validity, valid=False, reason=Reason.CLIENT_LAG)
    text = _printed(replace(summary, verdict=verdict, validity=validity))
    assert "PASS" not in text
    assert "invalid: send lag" in text
    assert "INVALID (ClientLag) The run is invalid: the client sent late." in text


def test_a_class_without_an_objective_is_reported_and_not_judged(summary: Summary) -> None:
    quiet = replace(
        summary.classes[0], objective=None, verdict=None, reason=None, interval=None, sentence=""
    )
    line = next(
        line
        for line in _printed(replace(summary, classes=(quiet,))).splitlines()
        if line.strip().startswith("interactive")
    )
    assert line.split()[-4:-1] == ["–", "–", "–"]


def test_a_single_class_has_no_total_row(summary: Summary) -> None:
    text = _printed(replace(summary, classes=summary.classes[:1]))
    assert not any(line.strip().startswith("all ") for line in text.splitlines())


def test_a_name_with_markup_is_printed_unchanged(summary: Summary) -> None:
    named = replace(summary.classes[0], name="[red]x[/]")
    assert "[red]x[/]" in _printed(replace(summary, classes=(named, *summary.classes[1:])))


def test_disclosed_lengths_are_printed(summary: Summary) -> None:
    assert "disclosed" not in _printed(summary)
    foreign = replace(summary.target, pinning=LengthPinning.MAX_TOKENS)
    text = _printed(replace(summary, target=foreign))
    assert "disclosed by max_tokens" in " ".join(text.split())


def test_the_path_of_the_report_can_be_copied(summary: Summary, tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    assert f"run: {folder}\n" in _printed(summary, folder=folder)
    (folder / "report.html").write_text("")
    assert f"report: {folder / 'report.html'}\n" in _printed(summary, folder=folder)


def test_sixty_columns_keep_class_names_and_verdicts(summary: Summary) -> None:
    unsure = replace(
        summary.classes[0], name="interactive-premium", verdict=VerdictKind.INCONCLUSIVE
    )
    text = _printed(replace(summary, classes=(unsure, *summary.classes[1:])), width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert "…" not in text
    assert text.count(" interactive-premium ") == 3, "complete in every table"
    assert "INCONCLUSIVE" in text
    assert "TTFT p99" in text


def test_misses_of_all_kinds_fold_at_sixty_columns(summary: Summary) -> None:
    misses = {reason.value: 1_234 for reason in MissReason}
    one = replace(summary.classes[0], misses=misses)
    overall = replace(summary.overall, misses=misses)
    text = _printed(replace(summary, classes=(one,), overall=overall), width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert all(f"{reason.value} 1,234" in " ".join(text.split()) for reason in MissReason)


def test_a_class_without_a_request_is_left_out(summary: Summary) -> None:
    idle = replace(summary.classes[1], name="idle", requests=0, good=0, total=0, attainment=None)
    text = _printed(replace(summary, classes=(*summary.classes, idle)))
    tables = text.partition("valid:")[0]
    assert "idle" not in tables
    assert "batch" in tables


def test_errors_are_listed_with_their_counts(summary: Summary) -> None:
    error = ErrorSummary(outcome="error", status=404, detail="HTTP 404: no [b]x[/]", count=1_234)
    text = _printed(replace(summary, errors=(error,), other_errors=7))
    assert "1,234 ×  HTTP 404: no [b]x[/]" in text
    assert "7 ×  other errors" in text


ESCAPE = "\x1b]0;owned\x07"
SHOWN = r"\x1b]0;owned\x07"


def _with_escapes(summary: Summary, place: str) -> Summary:
    match place:
        case "class":
            named = replace(summary.classes[0], name=ESCAPE)
            return replace(summary, classes=(named, *summary.classes[1:]))
        case "trace":
            return replace(summary, trace=replace(summary.trace, name=f"{ESCAPE}.parquet"))
        case "error":
            error = ErrorSummary(outcome="error", status=404, detail=ESCAPE, count=1)
            return replace(summary, errors=(error,))
        case _:
            return replace(summary, verdict=replace(summary.verdict, sentence=f"{ESCAPE} failed."))


@pytest.mark.parametrize("place", ["class", "trace", "error", "verdict"])
def test_control_characters_are_escaped(summary: Summary, place: str) -> None:
    text = _printed(_with_escapes(summary, place))
    assert text.replace("\n", "").isprintable()
    assert SHOWN in text


def test_control_characters_of_the_folder_are_escaped(summary: Summary, tmp_path: Path) -> None:
    assert rf"run: {tmp_path}/{SHOWN}" in _printed(summary, folder=tmp_path / ESCAPE)
