"""`replay gate` on recorded runs, from the command line's arguments to the exit code."""

from __future__ import annotations

import shutil
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.replay.compare.recorded import CHAT, chat_run, gate, make_recording, pairs, spread
from tests.replay.conftest import INFO

from goodput_core.errors import InputError
from goodput_core.slo.verdict import VerdictKind
from goodput_core.units import NS_PER_S
from goodput_replay.compare.gate import RunPair, judge_runs
from goodput_replay.compare.gate_command import main
from goodput_replay.compare.recording import RecordedPair, write_recording
from goodput_replay.runs.slo import SLOClasses
from goodput_replay.runs.summary_parts import SessionsSummary

if TYPE_CHECKING:
    from pathlib import Path


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
    write_recording(tmp_path, make_recording(same_build=True, pairs=4, folder=tmp_path))
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
    recording = make_recording(same_build=True, pairs=0, folder=tmp_path)
    write_recording(tmp_path / "aa", replace(recording, pairs=tuple(quiet)))
    arguments = [*pairs(tmp_path, count=1, lost=24), "--history", str(tmp_path / "aa")]
    _, result = gate(arguments, capsys)
    (chat,) = result["classes"]
    difference = next(check for check in chat["checks"] if check["rule"] == "difference")
    assert difference["verdict"] == "INCONCLUSIVE"


def test_copies_in_a_history_do_not_count_twice(tmp_path: Path) -> None:
    arguments = pairs(tmp_path, count=1)
    recording = make_recording(same_build=True, pairs=2, folder=tmp_path, looks=(2,))
    write_recording(tmp_path, recording)
    shutil.rmtree(tmp_path / "history" / "a-1")
    shutil.copytree(tmp_path / "history" / "a-0", tmp_path / "history" / "a-1")
    with pytest.raises(InputError, match=r"a-0 and .*a-1 are copies of one run"):
        main([*arguments, "--history", str(tmp_path)])


def test_a_history_of_two_builds_is_refused(tmp_path: Path) -> None:
    arguments = pairs(tmp_path, count=1)
    write_recording(tmp_path, make_recording(same_build=False, pairs=4, folder=tmp_path))
    with pytest.raises(InputError, match=r"compares a\.yaml and b\.yaml"):
        main([*arguments, "--history", str(tmp_path)])


def test_a_recording_names_its_pairs_margin_and_confidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recording(tmp_path, make_recording(same_build=False, pairs=4, folder=tmp_path))
    code, result = gate([str(tmp_path)], capsys)
    assert code == 0
    assert (result["margin"], result["confidence"]) == (0.02, 0.9)
    assert len(result["candidates"]) == len(result["baselines"]) == 4


def test_an_early_look_is_stricter_than_a_single_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = make_recording(same_build=False, pairs=4, folder=tmp_path, looks=(4, 8))
    write_recording(tmp_path, recording)
    _, result = gate([str(tmp_path)], capsys)
    assert result["confidence"] > 0.97


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


def test_disturbances_that_decide_only_together_make_the_comparison_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A third of the misses are slow, a third are late, and a third are rejected."""
    runs = [
        chat_run(
            tmp_path / str(n),
            seconds=30,
            per_s=4,
            missed=[7 * n % 120],
            late=[(7 * n + 40) % 120],
            unauthorised=[(7 * n + 80) % 120],
        )
        for n in range(20)
    ]
    code, result = gate([str(run) for run in runs], capsys)
    assert (code, result["verdict"]) == (3, "INVALID")
    assert "(20 in the candidate) and without the client's lag" in result["sentence"]


@pytest.mark.parametrize(
    ("ratio", "missed", "verdict"),
    [
        pytest.param(0.4, 0, "INVALID", id="short prompts pass"),
        pytest.param(1.0, 0, "PASS", id="prompts of the trace pass"),
        pytest.param(1.0, 8, "FAIL", id="prompts of the trace fail"),
        pytest.param(2.5, 8, "INVALID", id="long prompts fail"),
        pytest.param(0.4, 8, "FAIL", id="short prompts fail, too"),
    ],
)
def test_prompts_of_another_length_over_several_runs_decide_nothing(
    ratio: float, missed: int, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No run alone has enough requests for a verdict."""
    runs = [
        chat_run(
            tmp_path / str(n),
            per_s=3,
            missed=range(n, 180, 22) if missed else (),
            prompt_ratio=ratio,
        )
        for n in range(4)
    ]
    _, result = gate([str(run) for run in runs], capsys)
    assert result["verdict"] == verdict, result["sentence"]
    assert ("--tokenizer" in result["sentence"]) is (verdict == "INVALID")


def test_longer_prompts_than_those_of_the_baseline_explain_a_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slo = SLOClasses(classes=(replace(CHAT.classes[0], objective=Fraction("0.5")),), default="chat")
    runs: dict[str, list[str]] = {"old": [], "new": []}
    for number in range(4):
        for place, build in enumerate(("old", "new")[:: 1 if number % 2 else -1]):
            started = f"2026-03-04T05:{10 * number + 5 * place:02}:00.000000+00:00"
            is_new = build == "new"
            folder = chat_run(
                tmp_path / f"{build}-{number}",
                missed=range(number, 600, 15) if is_new else (),
                prompt_ratio=1.3 if is_new else 1.0,
                slo=slo,
                run=replace(INFO.run, started_at=started),
            )
            runs[build].append(str(folder))
    code, result = gate([*runs["new"], "--baseline", *runs["old"]], capsys)
    assert (code, result["verdict"]) == (3, "INVALID")
    assert "counted 1.30 times the prompt tokens of the baseline's target" in result["sentence"]


SESSIONS = SessionsSummary(
    starts=300,
    follow_ups=0,
    think_recorded=0,
    think_from_ends=0,
    think_from_arrivals=0,
    overlapping=0,
    without_parent=0,
)


def test_runs_whose_sessions_end_at_different_times_are_judged_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        str(
            chat_run(
                tmp_path / str(number),
                per_s=5,
                window_ns=(60 + number) * NS_PER_S,
                run=replace(
                    INFO.run,
                    sessions=SESSIONS,
                    started_at=f"2026-03-04T05:{number:02}:00.000000+00:00",
                ),
            )
        )
        for number in range(4)
    ]
    code, result = gate([*runs[::2], "--baseline", *runs[1::2]], capsys)
    assert (code, result["verdict"]) == (0, "PASS")
    assert result["classes"][0]["total"] == 600


def test_a_class_that_could_not_be_judged_is_not_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(chat_run(tmp_path / "run", seconds=120, cancelled=range(1200)))
    code, result = gate([run], capsys)
    assert (code, result["reason"]) == (2, "NoRows")


def test_many_looks_do_not_exhaust_the_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = tuple(range(4, 46, 2))
    write_recording(
        tmp_path, make_recording(same_build=False, pairs=4, folder=tmp_path, looks=looks)
    )
    code, result = gate([str(tmp_path)], capsys)
    assert code == 2
    assert result["confidence"] < 1


def test_baselines_may_be_named_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("b-1", "b-2", "a-1", "a-2")
    b1, b2, a1, a2 = (str(chat_run(tmp_path / name, seconds=120)) for name in names)
    _, result = gate([b1, b2, "--baseline", a1, "--baseline", a2], capsys)
    assert result["baselines"] == [a1, a2]
