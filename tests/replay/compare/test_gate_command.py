"""`replay gate` on recorded runs, from the command line's arguments to the exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pyarrow.parquet as pq
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.replay.compare.recorded import CHAT, chat_run
from tests.replay.conftest import INFO

from goodput_core.dispatch import run_command
from goodput_core.errors import InputError, UsageError
from goodput_core.replay_job import decode_ab_result
from goodput_core.slo.verdict import VerdictKind
from goodput_replay.compare.compare_command import main as compare
from goodput_replay.compare.gate import RunPair, judge_runs
from goodput_replay.compare.gate_command import main
from goodput_replay.compare.recording import AB_FILE, ABRecording, RecordedPair, write_recording
from goodput_replay.runs.files import (
    RECORDS_FILE,
    REPORT_FILE,
    SERVICE_LOG_FILE,
    SUMMARY_FILE,
)
from goodput_replay.runs.slo import SLOClasses

if TYPE_CHECKING:
    from goodput_replay.runs.summary import RunSummary


def spread(count: int, offset: int = 0) -> range:
    """Return evenly spread numbers of requests of a run of two minutes."""
    return range(offset, 1200, 1200 // count)


def pairs(folder: Path, *, lost: int = 0, count: int = 4, order: str = "") -> list[str]:
    """Record pairs in which the candidate misses more requests; return the arguments.

    Args:
        folder: parent of the runs.
        lost: requests that only the candidate misses.
        count: number of pairs.
        order: builds in the order of their runs, A for the baseline; ABBA and so on if empty.
    """
    old: list[str] = []
    new: list[str] = []
    order = order or "ABBA" * count
    minutes = {build: [at for at, one in enumerate(order) if one == build] for build in "AB"}

    def at(build: str, number: int) -> RunSummary:
        minute = minutes[build][number]
        return replace(INFO.run, started_at=f"2026-03-04T05:{minute:02}:07.000000+00:00")

    for number in range(count):
        before = set(spread(6, number))
        after = before | set(spread(lost, number + 5) if lost else ())
        for runs, name, missed, build in ((old, "old", before, "A"), (new, "new", after, "B")):
            run = at(build, number)
            runs.append(
                str(chat_run(folder / f"{name}-{number}", missed=missed, seconds=120, run=run))
            )
    return [*new, "--baseline", *old]


def gate(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main([*arguments, "--json"])
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result["exit_code"] == code
    return code, result


def test_equal_builds_pass_and_a_worse_one_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = gate([*pairs(tmp_path / "equal"), "--margin", "2%"], capsys)
    assert (code, result["verdict"], result["reason"]) == (0, "PASS", "Attained")
    code, result = gate([*pairs(tmp_path / "worse", lost=60), "--margin", "2%"], capsys)
    assert (code, result["verdict"]) == (1, "FAIL")
    (chat,) = result["classes"]
    assert chat["difference"] == pytest.approx(-0.05)
    assert {check["reason"] for check in chat["checks"]} == {
        "BelowObjective",
        "WorseThanBaseline",
    }
    assert all(pair["lost"] == 60 for pair in chat["pairs"])


@pytest.mark.parametrize("order", ["AAAABBBB", "BBBBAAAA"])
@pytest.mark.parametrize("lost", [0, 60])
def test_runs_of_one_build_after_the_other_show_no_difference_between_builds(
    order: str, lost: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*pairs(tmp_path / order, lost=lost, order=order), "--margin", "2%"]
    code, result = gate(arguments, capsys)
    (chat,) = result["classes"]
    checks = {check["rule"]: check for check in chat["checks"]}
    difference = checks["difference"]
    assert (difference["verdict"], difference["reason"]) == ("INCONCLUSIVE", "RunOrder")
    assert "alternate the builds, as replay ab does" in difference["sentence"]
    assert chat["difference"] == pytest.approx(-lost / 1200)
    # The order says nothing about the objective of the candidate, which is judged by itself.
    assert checks["objective"]["verdict"] == ("FAIL" if lost else "PASS")
    assert code == (1 if lost else 2)


@pytest.mark.parametrize("order", ["ABBAABBA", "ABABABAB", "AABABBAB"])
def test_runs_of_both_builds_in_turn_are_judged(
    order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = gate([*pairs(tmp_path, order=order), "--margin", "2%"], capsys)
    assert (code, result["reason"]) == (0, "Attained")
    warnings = "".join(result["warnings"])
    assert ("The baseline ran first in every pair" in warnings) is (order != "ABBAABBA")


def test_one_pair_is_inconclusive_until_a_history_shows_the_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = pairs(tmp_path, count=1)
    code, result = gate(arguments, capsys)
    assert (code, result["reason"]) == (2, "SinglePair")
    write_recording(tmp_path, _recording(same_build=True, pairs=4, folder=tmp_path))
    code, result = gate([*arguments, "--margin", "2%", "--history", str(tmp_path)], capsys)
    assert (code, result["verdict"]) == (0, "PASS")


def test_a_history_without_misses_says_nothing_about_a_busier_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = []
    for number in range(4):
        sides = {side: f"{side}-{number}" for side in ("baseline", "candidate")}
        for name in sides.values():
            chat_run(tmp_path / "aa" / name, seconds=120)
        quiet.append(RecordedPair(order="AB", salt="s", **sides))
    recording = _recording(same_build=True, pairs=0, folder=tmp_path)
    write_recording(tmp_path / "aa", replace(recording, pairs=tuple(quiet)))
    arguments = [*pairs(tmp_path, count=1, lost=24), "--history", str(tmp_path / "aa")]
    _, result = gate(arguments, capsys)
    (chat,) = result["classes"]
    difference = next(check for check in chat["checks"] if check["rule"] == "difference")
    assert difference["verdict"] == "INCONCLUSIVE"


def test_copies_in_a_history_do_not_count_twice(tmp_path: Path) -> None:
    arguments = pairs(tmp_path, count=1)
    recording = _recording(same_build=True, pairs=2, folder=tmp_path, looks=(2,))
    write_recording(tmp_path, recording)
    shutil.rmtree(tmp_path / "history" / "a-1")
    shutil.copytree(tmp_path / "history" / "a-0", tmp_path / "history" / "a-1")
    with pytest.raises(InputError, match=r"a-0 and .*a-1 are copies of one run"):
        main([*arguments, "--history", str(tmp_path)])


def test_a_history_of_two_builds_is_refused(tmp_path: Path) -> None:
    arguments = pairs(tmp_path, count=1)
    write_recording(tmp_path, _recording(same_build=False, pairs=4, folder=tmp_path))
    with pytest.raises(InputError, match=r"compares a\.yaml and b\.yaml"):
        main([*arguments, "--history", str(tmp_path)])


def test_a_recording_names_its_pairs_margin_and_confidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recording(tmp_path, _recording(same_build=False, pairs=4, folder=tmp_path))
    code, result = gate([str(tmp_path)], capsys)
    assert code == 0
    assert (result["margin"], result["confidence"]) == (0.02, 0.9)
    assert len(result["candidates"]) == len(result["baselines"]) == 4


def test_an_early_look_is_stricter_than_a_single_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = _recording(same_build=False, pairs=4, folder=tmp_path, looks=(4, 8))
    write_recording(tmp_path, recording)
    _, result = gate([str(tmp_path)], capsys)
    assert result["confidence"] > 0.97


def _recording(
    *, same_build: bool, pairs: int, folder: Path, looks: tuple[int, ...] = (4,)
) -> ABRecording:
    recorded = []
    for number in range(pairs):
        names = [f"history/{side}-{number}" for side in ("a", "b")]
        for offset, name in enumerate(names):
            missed = set(spread(6, number + offset))
            chat_run(folder / name, missed=missed, seconds=120)
        recorded.append(RecordedPair(order="AB", salt="s", baseline=names[0], candidate=names[1]))
    return ABRecording(
        baseline="a.yaml",
        candidate="b.yaml",
        same_build=same_build,
        looks=looks,
        confidence="90%",
        margin="2%",
        pairs=tuple(recorded),
    )


def test_without_a_baseline_the_objective_alone_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = str(chat_run(tmp_path / "good", seconds=120))
    assert gate([good], capsys)[0] == 0
    bad = str(chat_run(tmp_path / "bad", seconds=120, missed=spread(240)))
    code, result = gate([bad], capsys)
    assert (code, result["reason"]) == (1, "BelowObjective")
    assert result["margin"] is None


def test_an_invalid_run_on_either_side_is_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = str(chat_run(tmp_path / "good", seconds=120))
    slow = str(chat_run(tmp_path / "slow", seconds=120, lag_ms=90))
    for candidate, baseline in ((good, slow), (slow, good)):
        code, result = gate([candidate, "--baseline", baseline], capsys)
        assert (code, result["reason"]) == (3, "InvalidRun")
        assert f"{slow}: the p99 of the client's send lag" in result["sentence"]


def test_requests_that_only_the_candidate_rejects_are_its_misses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone, the run would be invalid; the baseline shows that the requests are valid."""
    rejecting = str(chat_run(tmp_path / "new", seconds=120, rejected=spread(240)))
    assert gate([rejecting], capsys)[0] == 3
    baseline = str(chat_run(tmp_path / "old", seconds=120))
    code, result = gate([rejecting, "--baseline", baseline], capsys)
    assert (code, result["reason"]) == (1, "BelowObjective")


def test_requests_that_both_reject_stay_the_clients_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        str(chat_run(tmp_path / name, seconds=120, rejected=spread(240))) for name in ("a", "b")
    ]
    assert gate([runs[0], "--baseline", runs[1]], capsys)[0] == 3


def test_requests_that_both_reject_do_not_fail_a_build_that_fixes_other_misses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rejected = set(spread(40))
    fixed = chat_run(tmp_path / "new", seconds=120, rejected=rejected)
    slow = set(spread(60, 7)) - rejected
    before = chat_run(tmp_path / "old", seconds=120, rejected=rejected, missed=slow)
    assert gate([str(fixed), "--baseline", str(before)], capsys)[0] == 3


def loose_pairs(folder: Path, *, candidate: dict[str, Any], baseline: dict[str, Any]) -> list[str]:
    """Record four pairs; each run alone is far above its objective."""
    new = [
        str(chat_run(folder / f"new-{n}", seconds=120, slo=LOOSE, **candidate)) for n in range(4)
    ]
    old = [str(chat_run(folder / f"old-{n}", seconds=120, slo=LOOSE, **baseline)) for n in range(4)]
    return [*new, "--baseline", *old]


LOOSE = SLOClasses(classes=(replace(CHAT.classes[0], objective=Fraction(1, 2)),), default="chat")
DECISIVE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a candidate fails by outputs that ended early": ({"short": spread(60)}, {}),
    "a candidate passes because the baseline's outputs ended early": (
        {"missed": spread(60)},
        {"short": spread(60)},
    ),
    "a candidate passes because the baseline was not streamed": (
        {"missed": spread(60)},
        {"unstreamed": spread(60)},
    ),
    "a candidate fails by the time limit of the client": ({"cut": spread(60)}, {}),
    "both deviate in different ways that hide a loss": (
        {"missed": spread(60), "short": spread(60, 7)},
        {"unstreamed": spread(60), "missed": spread(60, 7)},
    ),
}


@pytest.mark.parametrize(("candidate", "baseline"), DECISIVE.values(), ids=DECISIVE)
def test_deviations_of_one_side_neither_pass_nor_fail_a_candidate(
    candidate: dict[str, Any],
    baseline: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = loose_pairs(tmp_path, candidate=candidate, baseline=baseline)
    code, result = gate(runs, capsys)
    assert (code, result["verdict"]) == (3, "INVALID")
    assert "the difference check of chat" in result["sentence"]
    assert "with responses as requested" in result["sentence"]


HARMLESS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "few on one side": ({"short": spread(4)}, {}),
    "equal ones on both sides": ({"short": spread(60)}, {"short": spread(60)}),
    "a loss with and without them": (
        {"missed": spread(240), "short": spread(4, 3)},
        {"short": spread(4, 3)},
    ),
}


@pytest.mark.parametrize(("candidate", "baseline"), HARMLESS.values(), ids=HARMLESS)
def test_deviations_that_decide_nothing_leave_the_verdict(
    candidate: dict[str, Any],
    baseline: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = loose_pairs(tmp_path, candidate=candidate, baseline=baseline)
    _, result = gate(runs, capsys)
    assert result["verdict"] == ("FAIL" if "missed" in candidate else "PASS")


REJECTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "the candidate's key expires": (
        {"unauthorised": range(1100, 1200)},
        {},
        "INVALID",
        "invalid (400 in the candidate), the difference check of chat would be PASS",
    ),
    "every twentieth request of the candidate has a wrong key": (
        {"unauthorised": spread(60)},
        {},
        "INVALID",
        "the difference check of chat would be PASS, not FAIL",
    ),
    "the baseline's key hides a loss": (
        {"missed": spread(60)},
        {"unauthorised": spread(60, 7)},
        "INVALID",
        "invalid (240 in the baseline), the difference check of chat would be FAIL, not PASS",
    ),
    "the baseline served a lighter load": (
        {},
        {"unauthorised": spread(150)},
        "INVALID",
        "old-0: the server rejected 150 of 1200 requests as invalid (3xx or 4xx), so its load",
    ),
    "the candidate served a lighter load": (
        {"unauthorised": spread(150)},
        {"missed": spread(150)},
        "INVALID",
        "new-0: the server rejected 150 of 1200 requests as invalid (3xx or 4xx), so its load",
    ),
    "the baseline rejects what the candidate answers": (
        {"missed": spread(60)},
        {"rejected": spread(60, 7)},
        "INVALID",
        "rejected as invalid (240 in the baseline)",
    ),
    "a rejection and a wrong key hide each other": (
        {"rejected": spread(60)},
        {"unauthorised": spread(60, 7)},
        "INVALID",
        "rejected as invalid (240 in the baseline)",
    ),
    "the candidate rejects what the baseline answers": (
        {"rejected": spread(60)},
        {},
        "FAIL",
        "against the baseline",
    ),
    "few on one side": ({"unauthorised": spread(2)}, {}, "PASS", "against the baseline"),
    "the same ones on both sides": (
        {"rejected": spread(60)},
        {"rejected": spread(60)},
        "PASS",
        "against the baseline",
    ),
    "a loss with and without them": (
        {"missed": spread(240), "unauthorised": spread(10, 3)},
        {},
        "FAIL",
        "against the baseline",
    ),
}


@pytest.mark.parametrize(
    ("candidate", "baseline", "verdict", "text"), REJECTIONS.values(), ids=REJECTIONS
)
def test_errors_of_the_client_in_either_build_never_decide(
    candidate: dict[str, Any],
    baseline: dict[str, Any],
    verdict: str,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = loose_pairs(tmp_path, candidate=candidate, baseline=baseline)
    _, result = gate(runs, capsys)
    assert result["verdict"] == verdict
    assert text in result["sentence"]


def test_a_class_of_many_runs_fails_only_without_the_errors_of_the_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No run alone has enough requests for a verdict, with or without its errors."""
    runs = [
        str(chat_run(tmp_path / str(n), seconds=60, per_s=4, unauthorised=range(n, 240, 60)))
        for n in range(8)
    ]
    code, result = gate(runs, capsys)
    assert (code, result["verdict"]) == (3, "INVALID")
    assert "(32 in the candidate)" in result["sentence"]


_NUMBERS = st.sampled_from([range(0), range(3, 300, 50), range(5, 300, 14), range(2, 300, 5)])


@settings(max_examples=examples(12))
@given(
    missed=st.tuples(_NUMBERS, _NUMBERS),
    unauthorised=st.tuples(_NUMBERS, _NUMBERS),
    objective=st.sampled_from(["0.5", "0.9", "0.95"]),
)
def test_leaving_out_the_errors_of_the_client_changes_no_pass_or_fail(
    tmp_path_factory: pytest.TempPathFactory,
    missed: tuple[range, range],
    unauthorised: tuple[range, range],
    objective: str,
) -> None:
    folder = tmp_path_factory.mktemp("gate")
    slo = SLOClasses(
        classes=(replace(CHAT.classes[0], objective=Fraction(objective)),), default="chat"
    )

    def run(kind: str, pair: int, side: int) -> Path:
        second = pair * 2 + (side if pair else 1 - side)
        started = replace(INFO.run, started_at=f"2026-03-04T05:00:{second:02}.000000+00:00")
        changed: dict[str, Any] = {"missed": missed[side], kind: unauthorised[side]}
        path = folder / f"{kind}-{pair}-{side}"
        return chat_run(path, seconds=30, slo=slo, run=started, **changed)

    def verdict(kind: str) -> VerdictKind:
        pairs = [
            RunPair(candidate=run(kind, pair, 0), baseline=run(kind, pair, 1)) for pair in (0, 1)
        ]
        return judge_runs(pairs).verdict

    found = verdict("unauthorised")
    event(found)
    if found in {VerdictKind.PASS, VerdictKind.FAIL}:
        assert verdict("cancelled") is found


def test_lag_that_decides_only_over_several_runs_makes_the_comparison_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No run alone has enough requests for a verdict, with or without its lag."""
    old = [str(chat_run(tmp_path / f"old-{i}", seconds=60, per_s=4)) for i in range(8)]
    late = range(5, 240, 48)
    new = [str(chat_run(tmp_path / f"new-{i}", seconds=60, per_s=4, late=late)) for i in range(8)]
    code, result = gate([*new, "--baseline", *old], capsys)
    assert code == 3
    assert "without the client's lag" in result["sentence"]


def test_a_check_that_lag_decides_does_not_count_if_another_fails_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The candidate fails the difference only with its lag, and the objective in any case."""
    runs: dict[str, list[str]] = {"old": [], "new": []}
    for number in range(4):
        for place, build in enumerate(("old", "new")[:: 1 if number % 2 else -1]):
            started = f"2026-03-04T05:{10 * number + 5 * place:02}:00.000000+00:00"
            folder = chat_run(
                tmp_path / f"{build}-{number}",
                missed=range(0, 600, 2),
                late=range(1, 600, 12) if build == "new" else (),
                run=replace(INFO.run, started_at=started),
            )
            runs[build].append(str(folder))
    code, result = gate([*runs["new"], "--baseline", *runs["old"]], capsys)
    assert (code, result["reason"]) == (1, "BelowObjective"), result["sentence"]
    checks = {check["rule"]: check["verdict"] for check in result["classes"][0]["checks"]}
    assert checks == {"objective": "FAIL", "difference": "INVALID"}
    assert "against the baseline" not in result["sentence"]
    [warning] = result["warnings"]
    assert warning == (
        "Without the client's lag, the difference check of chat would be PASS, not FAIL; this "
        "check does not count."
    )
    junit = tmp_path / "junit.xml"
    assert main([*runs["new"], "--baseline", *runs["old"], "--junit", str(junit)]) == 1
    assert warning in " ".join(capsys.readouterr().out.split())
    assert [len(case.findall("error")) for case in ET.parse(junit).iter("testcase")] == [0, 1]


def test_a_class_that_could_not_be_judged_is_not_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(chat_run(tmp_path / "run", seconds=120, cancelled=range(1200)))
    code, result = gate([run], capsys)
    assert (code, result["reason"]) == (2, "NoRows")


def test_an_unfinished_recording_is_not_judged(tmp_path: Path) -> None:
    write_recording(tmp_path, _recording(same_build=False, pairs=2, folder=tmp_path, looks=(4,)))
    with pytest.raises(InputError, match="2 of 4 planned pairs are complete"):
        main([str(tmp_path)])


def test_many_looks_do_not_exhaust_the_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = tuple(range(4, 46, 2))
    write_recording(tmp_path, _recording(same_build=False, pairs=4, folder=tmp_path, looks=looks))
    code, result = gate([str(tmp_path)], capsys)
    assert code == 2
    assert result["confidence"] < 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"slo": replace(CHAT, outage_s=5)}, "slo.outageSeconds differs"),
        ({"lag_ms": 90}, "an invalid run cannot be part of a history"),
    ],
    ids=["other SLO", "invalid"],
)
def test_a_history_of_other_or_invalid_runs_is_refused(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    arguments = pairs(tmp_path, count=1)
    recording = _recording(same_build=True, pairs=2, folder=tmp_path, looks=(2,))
    shutil.rmtree(tmp_path / "history" / "b-1")
    chat_run(tmp_path / "history" / "b-1", seconds=120, **changes)
    write_recording(tmp_path, recording)
    with pytest.raises(InputError, match=text):
        main([*arguments, "--history", str(tmp_path)])


def test_judged_runs_are_no_history_of_themselves(tmp_path: Path) -> None:
    write_recording(tmp_path, _recording(same_build=True, pairs=4, folder=tmp_path))
    with pytest.raises(InputError, match="part of its own history"):
        main([str(tmp_path), "--history", str(tmp_path)])


def test_baselines_may_be_named_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("b-1", "b-2", "a-1", "a-2")
    b1, b2, a1, a2 = (str(chat_run(tmp_path / name, seconds=120)) for name in names)
    _, result = gate([b1, b2, "--baseline", a1, "--baseline", a2], capsys)
    assert result["baselines"] == [a1, a2]


@pytest.mark.parametrize(
    "changes",
    [
        {"confidence": "10%"},
        {"margin": "nope"},
        {"looks": ()},
        {"looks": (8, 4)},
        {"looks": (0, 4)},
        {"version": "2"},
    ],
)
def test_a_tampered_recording_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    recording = _recording(same_build=False, pairs=1, folder=tmp_path, looks=(1,))
    write_recording(tmp_path, replace(recording, **changes))
    with pytest.raises(InputError, match=r"ab\.json: not a recording"):
        main([str(tmp_path)])


def test_a_device_file_is_written_and_not_replaced(tmp_path: Path) -> None:
    run = str(chat_run(tmp_path / "run", seconds=120))
    (tmp_path / "null").symlink_to("/dev/null")
    main([run, "--junit", str(tmp_path / "null")])
    assert (tmp_path / "null").is_symlink()


def test_a_run_without_an_slo_is_refused(tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=5, slo=SLOClasses())
    with pytest.raises(InputError, match="the run has no SLO"):
        main([str(run)])


def test_runs_of_different_slos_are_refused_with_the_field(tmp_path: Path) -> None:
    old = chat_run(tmp_path / "old", seconds=120)
    new = chat_run(tmp_path / "new", seconds=120, warmup_rows=9)
    with pytest.raises(InputError, match="--warmup differs: 9 and 0; replay the same trace"):
        main([str(new), "--baseline", str(old)])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["a", "b", "--baseline", "c"], "2 runs of the candidate and 1 of the baseline"),
        (["a", "--history", "h"], "--history is only supported with --baseline"),
        (["a", "--margin", "-1%"], "--margin"),
        (["a", "--margin", "100%"], "--margin: .* a margin is at least 0% and below 100%"),
        (["a", "--confidence", "49%"], "--confidence: .* a confidence is at least 50%"),
        (["a", "--confidence", "100%"], "--confidence: .* at least 50% and below 100%"),
        (["a", "--serve", "8080"], "is not HOST:PORT"),
        ([], "RUN"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(arguments: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        main(arguments)


def test_copies_of_a_run_do_not_count_twice(tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=120)
    copy = shutil.copytree(run, tmp_path / "copy")
    text = f"{run} and {copy} are copies of one run; every run counts once"
    with pytest.raises(InputError, match=text):
        main([str(run), str(copy)])
    with pytest.raises(InputError, match="copies of one run"):
        main([str(run), "--baseline", str(copy)])


def test_the_same_run_does_not_count_twice(tmp_path: Path) -> None:
    run = str(chat_run(tmp_path / "run", seconds=120))
    with pytest.raises(InputError, match="given twice"):
        main([run, "--baseline", run])


def test_a_run_that_was_cut_off_is_named(tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=120)
    records = run / RECORDS_FILE
    records.write_bytes(records.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"records\.parquet: not a readable Parquet file"):
        main([str(run)])
    (run / SUMMARY_FILE).unlink()
    with pytest.raises(InputError, match="give the folder of a finished run"):
        main([str(run)])


@pytest.mark.parametrize("kept", [slice(0, 1000), slice(30, None)], ids=["the last", "the missed"])
def test_records_without_some_requests_of_the_summary_are_rejected(
    tmp_path: Path, kept: slice
) -> None:
    run = chat_run(tmp_path / "run", seconds=120, missed=range(30))
    table = pq.read_table(run / RECORDS_FILE)
    pq.write_table(table.take(list(range(1200))[kept]), run / RECORDS_FILE)
    with pytest.raises(InputError, match="the records are not those of the summary"):
        main([str(run)])


def test_records_of_another_run_are_rejected(tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=120, missed=range(300))
    other = chat_run(tmp_path / "other", seconds=120)
    (run / RECORDS_FILE).write_bytes((other / RECORDS_FILE).read_bytes())
    with pytest.raises(InputError, match=r"1200 of 1200 met .* and summary\.json .* 900 of 1200"):
        main([str(run)])


@pytest.mark.parametrize("command", ["gate", "compare", "report"])
def test_records_of_another_run_with_the_same_totals_are_rejected(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = chat_run(tmp_path / "run", seconds=120, missed=range(300))
    other = chat_run(tmp_path / "other", seconds=120, missed=range(100, 400))
    (run / RECORDS_FILE).write_bytes((other / RECORDS_FILE).read_bytes())
    names = [run, other] if command == "compare" else [run]
    assert run_command(["replay", command, *map(str, names)]) == 64
    (error,) = capsys.readouterr().err.splitlines()
    assert error == (
        f"error: {run / RECORDS_FILE}: the records are not those of the summary, which has another "
        "digest of them; restore both files or replay again"
    )


def test_a_summary_of_an_earlier_version_has_no_digest_and_is_accepted(tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=120)
    summary = json.loads((run / SUMMARY_FILE).read_text())
    assert summary.pop("records_digest").startswith("sha256:")
    (run / SUMMARY_FILE).write_text(json.dumps(summary))
    assert main([str(run)]) == 0
    assert run_command(["replay", "report", str(run)]) == 0


def test_a_flipped_bit_in_the_judgements_is_found(tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=120, missed=range(0, 1200, 7))
    path = run / RECORDS_FILE
    data = bytearray(path.read_bytes())
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    (judgement,) = (one for one in columns if one.path_in_schema == "judgement")
    data[judgement.data_page_offset + judgement.total_compressed_size // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"records\.parquet: damaged"):
        main([str(run)])


def test_a_recording_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    pair = RecordedPair(order="AB", salt="s", baseline="../secret", candidate="b")
    recording = ABRecording(
        baseline="a",
        candidate="b",
        same_build=False,
        looks=(1,),
        confidence="95%",
        margin="1%",
        pairs=(pair,),
    )
    write_recording(tmp_path, recording)
    with pytest.raises(InputError, match="lies outside the folder"):
        main([str(tmp_path)])


def test_files_for_pipelines_tell_the_three_outcomes_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {
        "PASS": str(chat_run(tmp_path / "good", seconds=120)),
        "FAIL": str(chat_run(tmp_path / "bad", seconds=120, missed=spread(240))),
        "INCONCLUSIVE": str(chat_run(tmp_path / "short", seconds=10)),
    }
    outcomes = {}
    for verdict, run in runs.items():
        junit, markdown = tmp_path / f"{verdict}.xml", tmp_path / f"{verdict}.md"
        main([run, "--junit", str(junit), "--markdown", str(markdown)])
        assert verdict in capsys.readouterr().out
        assert f" {verdict} (" in markdown.read_text().splitlines()[0]
        suite = ET.parse(junit).getroot()[0]
        outcomes[verdict] = (suite.get("tests"), suite.get("failures"), suite.get("errors"))
    assert outcomes == {
        "PASS": ("1", "0", "0"),
        "FAIL": ("1", "1", "0"),
        "INCONCLUSIVE": ("1", "0", "1"),
    }


def test_one_run_says_what_its_bounds_leave_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(chat_run(tmp_path / name, seconds=120)) for name in ("a", "b")]
    main(runs[:1])
    printed = " ".join(capsys.readouterr().out.split())
    assert "The spread between runs is not included." in printed
    main(runs)
    assert "spread" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("columns", "last"),
    [("120", ["gained", "lost", "verdict"]), ("95", ["difference", "bounds", "verdict"])],
)
def test_a_narrow_terminal_gets_fewer_columns_and_no_cut_ones(
    columns: str,
    last: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = chat_run(tmp_path / "old", seconds=120, missed=spread(6))
    new = chat_run(tmp_path / "new", seconds=120, missed=spread(240))
    monkeypatch.setenv("COLUMNS", columns)
    main([str(new), "--baseline", str(old)])
    lines = capsys.readouterr().out.splitlines()
    (header,) = (line for line in lines if line.startswith(" class "))
    assert header.split()[-3:] == last
    (row,) = (line for line in lines if line.startswith(" chat "))
    assert row.split()[-1] == "FAIL"


@pytest.mark.parametrize("other", ["result", "./result", "link", "folder/../result"])
def test_two_outputs_never_replace_each_other(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(chat_run(tmp_path / "run", seconds=120))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("result")
    with pytest.raises(UsageError, match=r"--markdown .*: is the file of --junit, too"):
        main([run, "--junit", "result", "--markdown", other])
    assert not (tmp_path / "result").exists()


def test_an_output_never_replaces_the_json_that_the_shell_redirects(tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=120)
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "goodput_core", "replay", "gate", str(run), "--json"]
    with result.open("wb") as file:
        done = subprocess.run(
            [*command, "--junit", str(result)], stdout=file, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, result.read_bytes()) == (64, b"")
    assert b"is the standard output, too" in done.stderr


def test_an_output_never_replaces_a_file_of_a_run(tmp_path: Path) -> None:
    run, other = (chat_run(tmp_path / name, seconds=120) for name in ("run", "other"))
    kept = (run / RECORDS_FILE).read_bytes()
    for path in (run / "." / RECORDS_FILE, other / REPORT_FILE, other / SERVICE_LOG_FILE):
        with pytest.raises(UsageError, match="is a file of a run"):
            main([str(run), "--markdown", str(path)])
        with pytest.raises(UsageError, match="is a file of a run"):
            compare([str(other), str(run), "--html", str(path)])
    assert (run / RECORDS_FILE).read_bytes() == kept
    assert main([str(run), "--markdown", str(run / "gate.md")]) == 0
    assert main([str(run), "--markdown", str(tmp_path / REPORT_FILE)]) == 0


def test_an_output_never_replaces_the_plan_of_a_recording(tmp_path: Path) -> None:
    write_recording(tmp_path, _recording(same_build=False, pairs=1, folder=tmp_path, looks=(1,)))
    with pytest.raises(UsageError, match=r"ab\.json: is a file of `replay ab`"):
        main([str(tmp_path), "--junit", str(tmp_path / AB_FILE)])


PAGES: dict[str, tuple[list[str], bytes, bytes]] = {
    "gate": (["gate", "new", "--junit", "/dev/stdout"], b"PASS (Attained)", b"</testsuites>\n"),
    "compare": (["compare", "old", "new", "--html", "/dev/stdout"], b"<!DOCTYPE", b"measures.\n"),
    "report": (["report", "new", "--out", "/dev/stdout"], b"<!DOCTYPE html>", b"</html>"),
}


@pytest.mark.parametrize(("arguments", "first", "last"), PAGES.values(), ids=PAGES)
def test_an_output_may_be_the_pipe_of_the_standard_output(
    arguments: list[str], first: bytes, last: bytes, tmp_path: Path
) -> None:
    """The link in the folder of devices stays, too; a rename would replace it."""
    for name in ("old", "new"):
        chat_run(tmp_path / name, seconds=120)
    command = [sys.executable, "-m", "goodput_core", "replay", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert first in done.stdout
    assert done.stdout.endswith(last)
    assert done.stdout.count(last) == 1
    assert Path("/dev/stdout").is_symlink()
    with (tmp_path / "page").open("wb") as file:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=file, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, (tmp_path / "page").read_bytes()) == (64, b"")
    assert b"is the standard output, too; name another file" in done.stderr


def test_a_margin_without_a_baseline_is_rejected(tmp_path: Path) -> None:
    run = str(chat_run(tmp_path / "run", seconds=120))
    with pytest.raises(UsageError, match="--margin is only supported with --baseline"):
        main([run, "--margin", "1%"])


@pytest.mark.parametrize(
    ("second", "overlaps"), [("05:08:06.999999", True), ("05:08:07.000000", False)]
)
def test_runs_at_the_same_time_are_named_in_every_output(
    second: str, overlaps: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = {"late": second, "early": "05:06:07.000000"}
    runs = [
        str(
            chat_run(
                tmp_path / name,
                seconds=120,
                run=replace(INFO.run, started_at=f"2026-03-04T{start}+00:00"),
            )
        )
        for name, start in starts.items()
    ]
    markdown = tmp_path / "gate.md"
    _, result = gate(runs, capsys)
    assert len(result["warnings"]) == overlaps
    main([*runs, "--markdown", str(markdown)])
    printed = " ".join(capsys.readouterr().out.split())
    for text in (printed, markdown.read_text()):
        assert ("ran at the same time" in text) is overlaps
    if overlaps:
        (warning,) = result["warnings"]
        assert warning.startswith(f"{runs[1]} and {runs[0]} ran at the same time. ")
        assert warning in printed


@pytest.mark.parametrize(
    "started_at", ["yesterday", "2026-03-04T05:06:07"], ids=["text", "no zone"]
)
def test_a_start_that_is_no_instant_is_rejected(started_at: str, tmp_path: Path) -> None:
    run = chat_run(tmp_path / "run", seconds=5, run=replace(INFO.run, started_at=started_at))
    with pytest.raises(InputError, match=r"summary\.json: not a run's summary .*or replay again"):
        main([str(run)])


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(chat_run(tmp_path / "run", seconds=120))
    with pytest.raises(InputError, match=r"missing/gate\.xml: the result cannot be written"):
        main([run, "--junit", str(tmp_path / "missing" / "gate.xml")])
    assert "PASS" in capsys.readouterr().out, "the verdict is not lost"


@pytest.mark.parametrize(
    ("window", "problem"),
    [
        ({"length_s": -5.0}, "the window does not end after its start"),
        ({"length_s": 0.0}, "the window does not end after its start"),
        ({"length_s": 4e7}, "the window is longer than a year"),
        ({"start_s": -4e7}, "begins more than a year away"),
    ],
    ids=["negative", "empty", "long", "late"],
)
def test_a_window_that_no_run_has_is_rejected_with_its_problem(
    tmp_path: Path, window: dict[str, float], problem: str
) -> None:
    run = chat_run(tmp_path / "run", seconds=5)
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    summary["window"] |= window
    path.write_text(json.dumps(summary))
    with pytest.raises(InputError, match=rf"summary\.json: not a run's summary .*{problem}"):
        main([str(run)])


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_files_are_written_if_the_reader_of_the_output_has_ended(
    tmp_path: Path, form: list[str]
) -> None:
    run, junit = chat_run(tmp_path / "run"), tmp_path / "gate.xml"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "goodput_core", "replay", "gate", str(run)]
    done = subprocess.run(
        [*command, *form, "--junit", str(junit)], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
    assert junit.read_bytes().endswith(b"</testsuites>\n")


def store(folder: Path, *runs: Path) -> str:
    """Copy runs into a folder that stands for object storage, and return its URI."""
    for run in runs:
        shutil.copytree(run, folder / run.name)
    return f"file://{folder}"


def test_runs_in_object_storage_are_named_by_their_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [chat_run(tmp_path / name, seconds=120) for name in ("new", "old")]
    local = gate([str(runs[0]), "--baseline", str(runs[1])], capsys)
    uri = store(tmp_path / "store", *runs)
    arguments = [f"{uri}/new", "--baseline", f"{uri}/old", "--result-file", str(tmp_path / "r")]
    code, result = gate(arguments, capsys)
    assert (result["candidates"], result["baselines"]) == ([f"{uri}/new"], [f"{uri}/old"])
    assert (code, result["classes"]) == (local[0], local[1]["classes"])
    message = decode_ab_result((tmp_path / "r").read_text(encoding="utf-8"))
    assert message is not None
    assert (message.verdict, message.reason, message.pairs) == (
        "INCONCLUSIVE", "SinglePair", 1,
    )  # fmt: skip
    assert message.interval == "chat: 0.00 points (−0.23 … +0.23)"
    assert not list(Path(tempfile.gettempdir()).glob("goodput-*/run-*")), "the copies are removed"


def damage(run: Path, kind: str) -> None:
    """Make a run unusable as a baseline."""
    summary = run / SUMMARY_FILE
    if kind == "absent":
        shutil.rmtree(run)
    elif kind == "no records":
        (run / RECORDS_FILE).unlink()
    elif kind == "no summary":
        summary.unlink()
    elif kind == "other file":
        summary.write_bytes(b"\x00\xff{")
    elif kind == "other records":
        (run / RECORDS_FILE).write_bytes(b"PAR1" + b"\x00" * 64 + b"PAR1")
    else:
        content = json.loads(summary.read_text(encoding="utf-8"))
        if kind == "other format":
            content["version"] = "99"
        elif kind == "other trace":
            content["trace"]["digest"] = "sha256:" + "00" * 32
        elif kind == "other SLO":
            content["promises"][0]["ttft_ms"] = 501
        summary.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("absent", "{uri}/old: no such object"),
        ("no records", "{uri}/old/records.parquet: "),
        ("no summary", "{uri}/old/summary.json: "),
        ("other file", "{uri}/old/summary.json: "),
        ("other records", "{uri}/old/records.parquet: "),
        ("other format", "{uri}/old/summary.json: "),
        ("other trace", "{uri}/new and {uri}/old cannot be compared: the trace differs"),
        ("other SLO", "{uri}/new and {uri}/old cannot be compared: ttft_ms of chat differs"),
    ],
)
def test_an_unusable_baseline_is_one_sentence_and_no_verdict(
    tmp_path: Path, kind: str, words: str
) -> None:
    runs = [chat_run(tmp_path / name, seconds=30) for name in ("new", "old")]
    uri = store(tmp_path / "store", *runs)
    damage(tmp_path / "store/old", kind)
    result = tmp_path / "result"
    code = run_command(
        ["replay", "gate", f"{uri}/new", "--baseline", f"{uri}/old", "--result-file", str(result)]
    )
    assert code == 64
    message = decode_ab_result(result.read_text(encoding="utf-8"))
    assert message is not None
    assert (message.verdict, message.reason) == (None, "Error")
    assert message.message.startswith(words.format(uri=uri)), message.message
    assert "/goodput-" not in message.message, "no path of a copy"
    assert "\n" not in message.message
