"""The result of a capacity search, its sentence and its exit code."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from goodput_core.errors import ExitCode
from goodput_core.slo.verdict import VerdictKind
from goodput_replay.run.folder import RunWriter
from goodput_replay.sweep.capacity import _print_result, as_json, conclude
from goodput_replay.sweep.probe import ProbeRun
from goodput_replay.sweep.search import RateLevel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.replay.conftest import SyntheticRun

    from goodput_replay.run.summary import Summary

KINDS = {
    RateLevel.SHOWN: VerdictKind.PASS,
    RateLevel.SEEMS: VerdictKind.INCONCLUSIVE,
    RateLevel.FAILED: VerdictKind.FAIL,
}


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
    (missed,) = as_json(found, tried)["lower_that_do_not_hold"]
    assert missed["rate_scale"] == 4
    assert not as_json(conclude(tried[:1]), tried)["lower_that_do_not_hold"]


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
        [seems, failed], Console(stderr=True), tmp_path / "\x1b]0;f\x07", json_output=False
    )
    printed = capsys.readouterr()
    shown = printed.out + printed.err
    assert shown.replace("\n", "").isprintable()
    for text in ("c\\x07[b]", "s\\x07[b]", "v\\x07[b]", "f\\x07"):
        assert rf"\x1b]0;{text}" in shown
