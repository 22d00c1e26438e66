"""The check before a run that `replay gate` can compare it with earlier runs."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.builders.traces import steady_rows
from tests.replay.compare.recorded import chat_run
from tests.replay.compare.test_recorded_baseline import SIDES, STABLE, WINDOW_S, record, recording
from tests.replay.sending.conftest import trace_of
from tests.replay.sending.stand_ins import DONE, StandIn, finish, running, tokens, usage
from tests.replay.test_merge import replay

from goodput_core.errors import InputError, UnreachableError, UsageError
from goodput_replay.compare.comparable import RunInputs, require_comparable
from goodput_replay.compare.gate_command import main as judge
from goodput_replay.compare.recording import RecordedPair, write_recording
from goodput_replay.compare.runs import load_run
from goodput_replay.runs.summary import read_summary, write_summary
from goodput_replay.storage import upload_folder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.replay.sending.builders import WriteTrace

__all__ = ["trace_of"]


def inputs(folder: Path, **changes: Any) -> RunInputs:
    """Return the inputs of a run like those of the baseline in a folder."""
    summary = load_run(chat_run(folder, seconds=WINDOW_S, revision=STABLE)).summary
    same = {field.name: getattr(summary, field.name) for field in fields(RunInputs)}
    return RunInputs(**{**same, **changes})


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Return a folder with the recordings of three nights."""
    for night in range(3):
        started = f"2026-07-0{night + 1}T00:00:00+00:00"
        folder = record(tmp_path / "history", f"night-{night}", 2 + night) / "baseline"
        summary = read_summary(folder)
        write_summary(folder, replace(summary, run=replace(summary.run, started_at=started)))
    return tmp_path / "history"


def test_a_comparable_run_is_accepted_with_any_baseline(tmp_path: Path, history: Path) -> None:
    planned = inputs(tmp_path / "planned")
    earlier = str(chat_run(tmp_path / "july", seconds=WINDOW_S))
    require_comparable(planned, baseline=None, recorded=None)
    require_comparable(planned, baseline=earlier, recorded=None)
    require_comparable(planned, baseline=None, recorded=str(history))
    require_comparable(planned, baseline=earlier, recorded=str(history))


def test_a_baseline_that_the_gate_would_reject_is_rejected_before_the_run(
    tmp_path: Path, history: Path
) -> None:
    planned = inputs(tmp_path / "planned")
    earlier = chat_run(tmp_path / "july", seconds=WINDOW_S)

    def rejected(text: str, baseline: Path | None, recorded: Path | None = None) -> None:
        with pytest.raises(InputError, match=text):
            require_comparable(
                planned,
                baseline=None if baseline is None else str(baseline),
                recorded=None if recorded is None else str(recorded),
            )

    rejected("absent/summary.json: No such file", tmp_path / "absent")
    rejected("no recordings of `replay ab`", None, tmp_path / "absent")
    other = chat_run(tmp_path / "other", seconds=60)
    rejected("other: the length of the window differs: 120.0 and 60.0; replay the same", other)
    summary = read_summary(earlier)
    invalid = replace(summary.validity, valid=False, sentence="The client was late.")
    write_summary(earlier, replace(summary, validity=invalid))
    rejected("july, which is INVALID: The client was late.; name a valid run", earlier)
    write_summary(earlier, replace(summary, records_digest="sha256:0"))
    rejected("july/records.parquet: the records are not those of the summary", earlier)
    for night in (1, 2):
        shutil.rmtree(history / f"night-{night}" / "baseline")
        chat_run(history / f"night-{night}" / "baseline", seconds=60, revision=STABLE)
    rejected("needs 3 recordings .* 2 more were left out: .* is of other requests", None, history)


def test_recordings_in_object_storage_are_compared_like_those_on_a_disk(
    tmp_path: Path, history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = f"file://{tmp_path}/store/aa"
    upload_folder(history, store)
    run = str(chat_run(tmp_path / "run", seconds=WINDOW_S))
    results: list[tuple[int, str]] = []
    for place in (str(history), store):
        require_comparable(
            inputs(tmp_path / f"planned-{len(results)}"), baseline=None, recorded=place
        )
        code = judge([run, "--recorded", place])
        printed = capsys.readouterr().out
        results.append((code, printed.replace(place, "PLACE")))
    assert results[0] == results[1]
    with pytest.raises((InputError, UnreachableError), match=r"/store/none: .*no such object"):
        judge([run, "--recorded", f"file://{tmp_path}/store/none"])
    with pytest.raises(UsageError, match="is not a place in object storage"):
        judge([run, "--recorded", "http://x/y"])


async def test_a_wrong_baseline_ends_the_command_before_a_request_is_sent(
    trace_of: WriteTrace, tmp_path: Path
) -> None:
    served: list[int] = []

    def answer(count: int) -> Iterable[bytes]:
        served.append(count)
        return [*tokens(count), finish(), usage(count), DONE]

    async with running(StandIn(answer=answer)) as url:
        common = ["--trace", trace_of(steady_rows(20, per_s=50, output_tokens=3)), "--target", url]
        common += ["--ttft", "5s", "--tpot", "5s", "--objective", "90%", "--no-report"]
        code, _ = await replay(tmp_path, *common, "--out", "july")
        assert code in {0, 3}  # a busy test machine can be late
        served.clear()
        options = ["--check-baseline", "july", "--out", "august"]
        code, error = await replay(tmp_path, *common, "--speed", "2", *options)
        assert (code, len(served)) == (64, 1)  # the probe
        assert "error: the run cannot be compared with july: the trace selection differs" in error
        summary = read_summary(tmp_path / "july")
        # The first run may have been late.
        valid = replace(summary.validity, valid=True)
        write_summary(tmp_path / "july", replace(summary, validity=valid))
        code, _ = await replay(tmp_path, *common, *options)
    assert code in {0, 3}
    assert len(served) == 2 + 20


async def test_a_recorded_baseline_is_chosen_by_the_requests_before_they_are_sent(
    trace_of: WriteTrace, tmp_path: Path
) -> None:
    served: list[int] = []

    def answer(count: int) -> Iterable[bytes]:
        served.append(count)
        return [*tokens(count), finish(), usage(count), DONE]

    async with running(StandIn(answer=answer)) as url:
        common = ["--trace", trace_of(steady_rows(20, per_s=50, output_tokens=3))]
        common += ["--ttft", "5s", "--tpot", "5s", "--objective", "90%", "--no-report"]
        await replay(tmp_path, *common, "--target", url, "--out", "run")
        for day in range(1, 5):
            night = tmp_path / "history" / f"night-{day}"
            shutil.copytree(tmp_path / "run", night / "baseline")
            summary = read_summary(night / "baseline")
            # The run may have been late. The latest recording has another window.
            summary = replace(summary, validity=replace(summary.validity, valid=True))
            run = replace(summary.run, started_at=f"2026-03-0{day}T05:06:07+00:00")
            window = replace(summary.window, length_s=9.0) if day == 4 else summary.window
            write_summary(night / "baseline", replace(summary, run=run, window=window))
            pair = RecordedPair(order="AB", salt="s", **SIDES)
            write_recording(night, recording(pair))
        new = ("ab", "--target", url, "--recorded", "history", *common)
        served.clear()
        code, error = await replay(tmp_path, *new, "--speed", "4", "--out", "refused")
        # One probe of the announcement, and one of the run.
        assert (code, len(served)) == (64, 2), error
        assert "is of other requests: the trace selection differs" in error
        code, error = await replay(tmp_path, *new, "--out", "new")
    assert code in {0, 2, 3}, error
    copied = read_summary(tmp_path / "new" / "pair-1" / "baseline")
    assert copied.run.started_at.startswith("2026-03-03"), "the latest that fits"
