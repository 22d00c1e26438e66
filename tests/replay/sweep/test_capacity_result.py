"""The result of a capacity search, its sentence and its exit code."""

from __future__ import annotations

import io
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from goodput_core.errors import ExitCode
from goodput_core.slo.verdict import VerdictKind
from goodput_replay.runs.folder import RunWriter
from goodput_replay.runs.tables import choose_table
from goodput_replay.sweep.capacity import _print_result, conclude, tables
from goodput_replay.sweep.capacity_result import describe_capacity
from goodput_replay.sweep.probe import ProbePlan, ProbeRun
from goodput_replay.sweep.search import RateLevel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.replay.conftest import SyntheticRun

    from goodput_replay.runs.summary import Summary

KINDS = {
    RateLevel.SHOWN: VerdictKind.PASS,
    RateLevel.SEEMS: VerdictKind.INCONCLUSIVE,
    RateLevel.FAILED: VerdictKind.FAIL,
}

PLAN = ProbePlan(duration_s=60.0)


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory, synthetic_run: SyntheticRun) -> Summary:
    info = synthetic_run.info
    folder = tmp_path_factory.mktemp("capacity") / "run"
    with RunWriter(folder, slo=info.slo) as writer:
        for record in synthetic_run.records:
            writer.append(record)
        return writer.finish(info)


@pytest.fixture
def probe(summary: Summary, tmp_path: Path) -> Callable[[float, RateLevel], ProbeRun]:
    """Return a probe of a trace with two requests a second."""

    def make(scale: float, level: RateLevel) -> ProbeRun:
        verdict = replace(
            summary.verdict, kind=KINDS[level], sentence=f"A sentence on {level.name}. One run."
        )
        overall = replace(summary.overall, offered_per_s=2 * scale)
        return ProbeRun(
            scale=Fraction(scale),
            level=level,
            summary=replace(summary, verdict=verdict, overall=overall),
            folder=tmp_path,
        )

    return make


def test_the_result_names_the_sustained_rate_and_the_next_one(
    probe: Callable[[float, RateLevel], ProbeRun],
) -> None:
    found = conclude(
        [probe(1, RateLevel.SHOWN), probe(2, RateLevel.FAILED), probe(1.5, RateLevel.SHOWN)]
    )
    assert found.sentence == (
        "3 requests/s (1.5 times the trace's rate) is sustained; 4 requests/s is not (FAIL)"
    )
    assert found.exit_code is ExitCode.PASS


def test_the_result_states_that_no_higher_rate_was_tried(
    probe: Callable[[float, RateLevel], ProbeRun],
) -> None:
    found = conclude([probe(1, RateLevel.SHOWN)])
    assert found.sentence.endswith("is sustained; no higher rate was tried")


def test_a_rate_that_only_seems_sustained_is_reported_with_the_verdict(
    probe: Callable[[float, RateLevel], ProbeRun],
) -> None:
    found = conclude([probe(1, RateLevel.SEEMS)])
    assert found.sentence == (
        "2 requests/s (1 times the trace's rate) seems to be sustained, but is not shown to be; "
        "no higher rate was tried. A sentence on SEEMS. One run"
    )
    assert found.exit_code is ExitCode.INCONCLUSIVE


def test_a_failed_lower_rate_is_in_the_sentence_and_in_the_json(
    probe: Callable[[float, RateLevel], ProbeRun],
) -> None:
    tried = [probe(s, RateLevel.SHOWN) for s in (1, 5)]
    tried += [probe(s, RateLevel.FAILED) for s in (4, 8)]
    found = conclude(tried)
    assert (
        "A lower rate was not sustained (8 requests/s), so the limit is not sharp" in found.sentence
    )
    (missed,) = describe_capacity(found, tried, PLAN).lower_that_do_not_hold
    assert missed.rate_scale == 4
    assert not describe_capacity(conclude(tried[:1]), tried, PLAN).lower_that_do_not_hold


def test_several_failed_lower_rates_are_listed_in_the_sentence(
    probe: Callable[[float, RateLevel], ProbeRun],
) -> None:
    tried = [probe(s, RateLevel.FAILED) for s in (2, 3)]
    result = conclude([*tried, probe(5, RateLevel.SHOWN)])
    assert "Lower rates were not sustained (4 requests/s, 6 requests/s), so" in result.sentence


def test_a_lower_rate_with_too_few_requests_is_no_failure(
    probe: Callable[[float, RateLevel], ProbeRun],
) -> None:
    found = conclude(
        [probe(1, RateLevel.SEEMS), probe(2, RateLevel.SHOWN), probe(4, RateLevel.FAILED)]
    )
    assert "lower" not in found.sentence


def test_the_search_fails_if_no_rate_is_sustained(
    probe: Callable[[float, RateLevel], ProbeRun],
) -> None:
    found = conclude([probe(1, RateLevel.FAILED)])
    assert found.sentence == "no tried rate meets every class's objective"
    assert found.exit_code is ExitCode.FAIL


@pytest.mark.parametrize(
    ("plan", "mode"),
    [(PLAN, "independent"), (ProbePlan(duration_s=60.0, sessions={"starts": 3}), "causal")],
    ids=["independent", "causal"],
)
def test_the_mode_of_sessions_is_stated_although_no_probe_was_valid(
    plan: ProbePlan, mode: str
) -> None:
    found = describe_capacity(conclude([]), [], plan)
    assert (found.sessions, found.capacity, found.probes) == (mode, None, ())


def test_control_characters_of_classes_and_sentences_are_escaped(
    probe: Callable[[float, RateLevel], ProbeRun],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seems, failed = probe(1, RateLevel.SEEMS), probe(2, RateLevel.FAILED)
    classes = (replace(seems.summary.classes[0], name="\x1b]0;c\x07[b]"),)
    verdict = replace(seems.summary.verdict, sentence="\x1b]0;s\x07[b]")
    seems = replace(seems, summary=replace(seems.summary, classes=classes, verdict=verdict))
    validity = replace(failed.summary.validity, valid=False, sentence="\x1b]0;v\x07[b]")
    failed = replace(failed, summary=replace(failed.summary, validity=validity))
    _print_result(
        [seems, failed], PLAN, Console(stderr=True), tmp_path / "\x1b]0;f\x07", json_output=False
    )
    printed = capsys.readouterr()
    shown = printed.out + printed.err
    assert shown.replace("\n", "").isprintable()
    for text in ("c\\x07[b]", "s\\x07[b]", "v\\x07[b]", "f\\x07"):
        assert rf"\x1b]0;{text}" in shown


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    "names",
    [("",), ("interactive", "batch"), ("interactive-premium", "batch-of-the-night", "x")],
    ids=["one class", "two classes", "long names"],
)
def test_the_table_fits_the_terminal_without_cutting_names(
    probe: Callable[[float, RateLevel], ProbeRun], names: tuple[str, ...], width: int
) -> None:
    tried = []
    for scale in (1, 2.5, 123.456):
        one = probe(scale, RateLevel.SEEMS)
        classes = tuple(replace(one.summary.classes[0], name=name) for name in names)
        tried.append(replace(one, summary=replace(one.summary, classes=classes)))
    console = Console(file=(sink := io.StringIO()), width=width)
    console.print(choose_table(tables(tried), console))
    text = sink.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert text.count("INCONCLUSIVE") == 3
    assert all(name in text for name in names)
    assert width < 120 or "goodput/s" in text


def test_a_pipe_gets_every_column(
    probe: Callable[[float, RateLevel], ProbeRun],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = [probe(1, RateLevel.SHOWN)]
    monkeypatch.delenv("COLUMNS", raising=False)
    _print_result(shown, PLAN, Console(stderr=True), tmp_path, json_output=False)
    assert "goodput/s" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    _print_result(shown, PLAN, Console(stderr=True), tmp_path, json_output=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("runs: ")) <= 60
