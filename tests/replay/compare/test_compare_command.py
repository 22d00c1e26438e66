"""`replay compare` on recorded runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.replay.compare.recorded import chat_run

from goodput_core.errors import InputError, UsageError
from goodput_replay.compare.compare_command import main

if TYPE_CHECKING:
    from pathlib import Path


def compare(capsys: pytest.CaptureFixture[str], *runs: Path) -> list[dict[str, Any]]:
    assert main([*map(str, runs), "--json"]) == 0
    comparisons: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["comparisons"]
    return comparisons


def test_changed_requests_are_listed_with_their_reasons_lost_ones_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = chat_run(tmp_path / "old", missed={5})
    new = chat_run(tmp_path / "new", missed={31}, rejected={40})
    (comparison,) = compare(capsys, old, new)
    assert comparison["paired"]
    (chat,) = comparison["classes"]
    assert (chat["gained"], chat["lost"], chat["matched"]) == (1, 2, 600)
    assert chat["gained_by_reason"] == {"ttft": 1}
    assert chat["lost_by_reason"] == {"ttft": 1, "error": 1}
    flips = [(f["request_id"], f["lost"], f["reasons"]) for f in comparison["flips"]]
    assert flips == [
        ("r00031", True, ["ttft"]),
        ("r00040", True, ["error"]),
        ("r00005", False, ["ttft"]),
    ]
    first, second, _ = comparison["flips"]
    assert (first["baseline_ttft_ms"], first["candidate_ttft_ms"]) == (100.0, 800.0)
    assert first["at_s"] == 3.1
    assert second["detail"] == "HTTP 400: no"
    assert second["candidate_ttft_ms"] is None


def test_a_long_list_of_changed_requests_is_cut_and_the_rest_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = chat_run(tmp_path / "old")
    new = chat_run(tmp_path / "new", missed=range(250))
    (comparison,) = compare(capsys, old, new)
    assert len(comparison["flips"]) == 200
    assert comparison["other_flips"] == 50


def test_runs_of_different_traces_are_compared_unpaired_and_the_output_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = chat_run(tmp_path / "old", missed=range(0, 600, 10))
    new = chat_run(tmp_path / "new", seconds=90)
    (comparison,) = compare(capsys, old, new)
    assert not comparison["paired"]
    assert comparison["flips"] == []
    (chat,) = comparison["classes"]
    assert chat["difference"] == pytest.approx(0.1)
    assert 0 < chat["difference_lower"] < 0.1 < chat["difference_upper"]
    main([str(old), str(new)])
    assert "unpaired, because the length of the window differs" in capsys.readouterr().out


def test_every_further_run_is_compared_with_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        chat_run(tmp_path / name, ttft_ms=ms) for name, ms in (("a", 100), ("b", 150), ("c", 90))
    ]
    second, third = compare(capsys, *runs)
    assert second["baseline"] == third["baseline"] == str(runs[0])
    ttft = [c["classes"][0]["latencies"][0] for c in (second, third)]
    assert [(one["metric"], one["quantile"]) for one in ttft] == [("ttft", "p50")] * 2
    assert [one["candidate_ms"] for one in ttft] == [150.0, 90.0]


def test_an_invalid_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = chat_run(tmp_path / "old", lag_ms=90)
    new = chat_run(tmp_path / "new")
    (comparison,) = compare(capsys, old, new)
    assert len(comparison["invalid"]) == 1
    assert "send lag" in comparison["invalid"][0]


def test_requests_that_one_run_rejected_are_named_beside_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = chat_run(tmp_path / "old", missed=range(300))
    new = chat_run(tmp_path / "new", missed=range(300), unauthorised=range(300, 310))
    (comparison,) = compare(capsys, old, new)
    text = f"{new}: the server rejected 10 of 600 requests as invalid (3xx or 4xx), which count as"
    assert comparison["invalid"] == []
    assert [one.startswith(text) for one in comparison["rejections"]] == [True]
    page = tmp_path / "page.html"
    main([str(old), str(new), "--html", str(page)])
    assert "10 of 600 requests as invalid" in " ".join(capsys.readouterr().out.split())
    assert "10 of 600 requests as invalid" in page.read_text()


def test_two_different_runs_are_needed(tmp_path: Path) -> None:
    run = str(chat_run(tmp_path / "run"))
    with pytest.raises(UsageError, match="at least two runs"):
        main([run])
    with pytest.raises(UsageError, match="named twice"):
        main([run, run])
    with pytest.raises(InputError, match="give the folder of a finished run"):
        main([run, str(tmp_path / "missing")])
