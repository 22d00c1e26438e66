"""What a search says that it found."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from goodput_core.errors import ExitCode
from goodput_core.slo.verdict import VerdictKind
from goodput_replay.run.folder import RunWriter
from goodput_replay.sweep.capacity import as_json, conclude
from goodput_replay.sweep.probe import ProbeRun
from goodput_replay.sweep.search import Probe, RateLevel

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
    with RunWriter.create(folder, slo=info.slo) as writer:
        for record in synthetic_run.records:
            writer.append(record)
        return writer.finish(info)


@pytest.fixture
def probe(summary: Summary, tmp_path: Path) -> Callable[[float, RateLevel], ProbeRun]:
    """A probe at a scale of a trace with two requests a second."""

    def make(scale: float, level: RateLevel) -> ProbeRun:
        verdict = replace(
            summary.verdict, kind=KINDS[level], sentence=f"A sentence on {level.name}. One run."
        )
        overall = replace(summary.overall, offered_per_s=2 * scale)
        return ProbeRun(
            probe=Probe(scale=Fraction(scale), level=level),
            summary=replace(summary, verdict=verdict, overall=overall),
            folder=tmp_path,
        )

    return make


def test_the_rate_that_holds_and_the_next_one_are_named(
    probe: Callable[[float, RateLevel], ProbeRun],
) -> None:
    found = conclude(
        [probe(1, RateLevel.SHOWN), probe(2, RateLevel.FAILED), probe(1.5, RateLevel.SHOWN)]
    )
    assert found.sentence == "3 requests/s (1.5 times the trace's rate) holds; 4/s does not (FAIL)"
    assert found.exit_code is ExitCode.PASS


def test_without_a_higher_rate_that_fails_nothing_is_claimed_of_one(
    probe: Callable[[float, RateLevel], ProbeRun],
) -> None:
    found = conclude([probe(1, RateLevel.SHOWN)])
    assert found.sentence.endswith("holds; no higher rate was tried")


def test_what_only_seems_to_hold_is_said_in_whole_sentences(
    probe: Callable[[float, RateLevel], ProbeRun],
) -> None:
    found = conclude([probe(1, RateLevel.SEEMS)])
    assert found.sentence == (
        "2 requests/s (1 times the trace's rate) seems to hold, but is not shown to; "
        "no higher rate was tried. A sentence on SEEMS. One run"
    )
    assert found.exit_code is ExitCode.INCONCLUSIVE


def test_a_lower_rate_that_failed_is_told_to_a_person_and_to_a_program(
    probe: Callable[[float, RateLevel], ProbeRun],
) -> None:
    tried = [probe(s, RateLevel.SHOWN) for s in (1, 5)]
    tried += [probe(s, RateLevel.FAILED) for s in (4, 8)]
    found = conclude(tried)
    assert "A lower rate, 8/s, did not hold: there is no sharp limit" in found.sentence
    (hole,) = as_json(found, tried)["lower_that_do_not_hold"]
    assert hole["rate_scale"] == 4
    assert not as_json(conclude(tried[:1]), tried)["lower_that_do_not_hold"]


def test_a_lower_rate_with_too_few_requests_is_no_failure(
    probe: Callable[[float, RateLevel], ProbeRun],
) -> None:
    found = conclude(
        [probe(1, RateLevel.SEEMS), probe(2, RateLevel.SHOWN), probe(4, RateLevel.FAILED)]
    )
    assert "lower" not in found.sentence


def test_no_rate_that_holds_is_a_failure(probe: Callable[[float, RateLevel], ProbeRun]) -> None:
    found = conclude([probe(1, RateLevel.FAILED)])
    assert found.sentence == "no rate that was tried keeps every class's objective"
    assert found.exit_code is ExitCode.FAIL
