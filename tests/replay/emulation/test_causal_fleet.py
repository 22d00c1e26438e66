"""Follow-ups of sessions on a fleet in virtual time."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.fleets import SLO, make_fleet
from tests.builders.manifests import manifest_path
from tests.builders.sessions import follow_ups_of, session_row
from tests.builders.traces import write_rows

from goodput_core.dispatch import run_command
from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_MS
from goodput_replay.emulation.emulate import emulate
from goodput_replay.emulation.settings import DecodePool, MigrationSpec
from goodput_replay.runs.record_rows import read_judged
from goodput_replay.runs.summary import read_summary

if TYPE_CHECKING:
    from goodput_core.slo.record import RequestRecord
    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.sessions import FollowUps
    from goodput_traces.format.schema import TraceRow


def serve(follow_ups: FollowUps, fleet: FleetSettings) -> dict[str, RequestRecord]:
    records: dict[str, RequestRecord] = {}

    def on_record(_: object, record: RequestRecord) -> None:
        records[record.request_id] = record

    emulate(follow_ups.starts(), fleet, on_record, follow_ups=follow_ups)
    return records


def served(
    folder: Path, rows: list[TraceRow], fleet: FleetSettings | None = None
) -> dict[str, RequestRecord]:
    with follow_ups_of(folder, rows, slo=SLO) as follow_ups:
        return serve(follow_ups, fleet or make_fleet())


def pauses_ms(records: dict[str, RequestRecord], *names: str) -> list[float]:
    """Return the time from the end of each request to the scheduled time of the next."""
    return [
        (records[after].scheduled_ns - (records[before].end_ns or 0)) / NS_PER_MS
        for before, after in pairwise(names)
    ]


def test_a_follow_up_arrives_a_think_time_after_the_end_of_its_predecessor(tmp_path: Path) -> None:
    rows = [session_row(i, 1000 * i, delay_ms=(0, 2.5, 0, 900)[i]) for i in range(4)]
    records = served(tmp_path, rows)
    # A prompt of 8 tokens and 4 outputs take 4 steps of 1 ms.
    assert pauses_ms(records, "row-0", "row-1", "row-2", "row-3") == [2.5, 0, 900]
    assert [record.end_ns for record in records.values()] == [
        4_000_000, 10_500_000, 14_500_000, 918_500_000
    ]  # fmt: skip


def test_a_slow_server_delays_follow_ups_but_not_starts(tmp_path: Path) -> None:
    rows = [session_row(0, 0, output_tokens=500), session_row(1, 10), session_row(2, 20, "b")]
    records = served(tmp_path, rows, make_fleet(max_num_seqs=1))
    assert records["row-2"].scheduled_ns == 20 * NS_PER_MS
    assert records["row-1"].scheduled_ns == 510 * NS_PER_MS


@pytest.mark.parametrize(
    ("first", "fleet", "outcome"),
    [
        ({"cancel_after_ms": 1.5, "output_tokens": 50}, {}, Outcome.CANCELLED),
        ({"output_tokens": 5000}, {"timeout_s": 0.2}, Outcome.TIMEOUT),
        ({"slo_class": "slow", "input_tokens": 9_000_000}, {}, Outcome.ERROR),
    ],
    ids=["cancelled by the trace", "timed out", "rejected"],
)
def test_a_follow_up_follows_a_request_that_failed(
    tmp_path: Path, first: dict[str, Any], fleet: dict[str, Any], outcome: Outcome
) -> None:
    rows = [session_row(0, 0, **first), session_row(1, 5, delay_ms=3)]
    records = served(tmp_path, rows, make_fleet(**fleet))
    assert records["row-0"].outcome is outcome
    assert records["row-1"].outcome is Outcome.OK
    assert pauses_ms(records, "row-0", "row-1") == [3]


def test_follow_ups_of_shed_requests_are_sent_and_shed_too(tmp_path: Path) -> None:
    rows = [session_row(0, 0, "busy", output_tokens=400)]
    rows += [session_row(i, i, delay_ms=0) for i in range(1, 6)]
    fleet = make_fleet(max_num_seqs=1, max_waiting=0)
    records = served(tmp_path, [*rows, session_row(9, 900, "busy")], fleet)
    assert [records[f"row-{i}"].outcome for i in range(1, 6)] == [Outcome.SHED] * 5
    assert len(records) == 7


def fleets() -> dict[str, FleetSettings]:
    two = make_fleet(replicas=2)
    return {
        "one replica": make_fleet(),
        "three replicas": make_fleet(replicas=3),
        "single steps": make_fleet(replicas=2, fast_forward=False),
        "little memory": make_fleet(profile={"kv_blocks": 8}, max_num_seqs=4),
        "two pools": replace(two, decode=DecodePool(replicas=1, configure=two.configure)),
        "migration": replace(two, migration=MigrationSpec(below_blocks=30)),
    }


@given(data=st.data(), name=st.sampled_from(list(fleets())))
@settings(max_examples=examples(40), deadline=None)
def test_every_request_is_served_once_and_every_follow_up_after_its_predecessor(
    data: st.DataObject, name: str
) -> None:
    rows: list[TraceRow] = []
    at_ms = 0
    for number in range(data.draw(st.integers(2, 20))):
        at_ms += data.draw(st.sampled_from([0, 1, 40]))
        session = "a" if number < 2 else data.draw(st.sampled_from(["a", "b", "c", None]))
        rows.append(
            session_row(
                number,
                at_ms,
                session,
                delay_ms=data.draw(st.sampled_from([0, 0.25, 1, 100])),
                input_tokens=data.draw(st.sampled_from([1, 16, 100])),
                output_tokens=data.draw(st.integers(1, 30)),
                cancel_after_ms=data.draw(st.sampled_from([None, None, 2.5])),
            )
        )
    with TemporaryDirectory() as folder:
        records = served(Path(folder), rows, fleets()[name])
    last: dict[str | None, TraceRow] = {}
    assert sorted(records) == sorted(row.request_id for row in rows)
    for row in rows:
        record, before = records[row.request_id], last.get(row.session_id)
        if before is None or row.session_id is None:
            start_ns = row.timestamp_start_unix_ns - rows[0].timestamp_start_unix_ns
            assert record.scheduled_ns == start_ns
        else:
            think_ns = round((row.delay_ms or 0) * NS_PER_MS)
            assert record.scheduled_ns == (records[before.request_id].end_ns or 0) + think_ns
        assert record.sent_ns == record.scheduled_ns <= (record.end_ns or 0)
        last[row.session_id] = row


def test_the_next_follow_up_finds_the_prompt_of_the_request_before_in_the_prefix_cache(
    tmp_path: Path,
) -> None:
    hashes = tuple(range(100, 112))
    rows = [
        session_row(
            i, i, input_tokens=64 * (i + 1), total_hashes=hashes[: 4 * (i + 1)], block_size=16
        )
        for i in range(3)
    ]
    records = served(tmp_path, rows)
    assert [records[f"row-{i}"].cached_tokens for i in range(3)] == [0, 64, 128]


def test_a_run_in_virtual_time_is_labelled_and_its_window_ends_with_the_last_arrival(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "chat.yaml"
    manifest.write_text(manifest_path("emulated").read_text())
    # In the trace, each session takes ten minutes; here, half a second.
    rows = sorted(
        (
            session_row(
                10 * s + t, 1000 * s + 60_000 * t, f"s{s}", delay_ms=50, turn=t, input_tokens=16
            )
            for s in range(6)
            for t in range(10)
        ),
        key=lambda row: row.timestamp_start_unix_ns,
    )
    trace = write_rows(tmp_path / "t.parquet", rows)
    argv = ["--trace", str(trace), "--emulate", str(manifest), "--sessions", "causal"]
    out = tmp_path / "run"
    assert run_command(["replay", *argv, "--warmup", "3", "-o", str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "t.parquet, causal sessions: 57 requests over" in text
    assert (
        "sessions: 6 requests start at their times in the trace, 54 follow the end of an earlier "
        "request; think times: 54 recorded"
    ) in text
    summary = read_summary(out)
    judged = [r.record.scheduled_ns for r in read_judged(out) if not r.warmup]
    assert len(judged) == 57
    assert summary.window.start_s * 1e9 == pytest.approx(min(judged), abs=1000)
    end_s = summary.window.start_s + summary.window.length_s
    assert end_s * 1e9 == pytest.approx(max(judged), abs=1000)
    assert end_s < 10
    assert "causal sessions</span>" in (out / "report.html").read_text()
    assert run_command(["replay", *argv, "--dry-run", "--json"]) == 0
    totals = json.loads(capsys.readouterr().out)
    assert totals["sessions"]["follow_ups"] == 54


def test_runs_of_different_session_modes_are_never_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "chat.yaml"
    manifest.write_text(manifest_path("emulated").read_text())
    rows = [session_row(i, 100 * i, f"s{i % 20}", delay_ms=9) for i in range(60)]
    trace = write_rows(tmp_path / "t.parquet", rows)
    base = ["replay", "--trace", str(trace), "--emulate", str(manifest), "--no-report", "-o"]
    runs = {name: str(tmp_path / name) for name in ("causal", "again", "plain", "other")}
    causal = ["--sessions", "causal"]
    assert run_command([*base, runs["causal"], *causal]) == 0
    assert run_command([*base, runs["again"], *causal, "--device", "llama-3-8b-h100"]) == 0
    assert run_command([*base, runs["plain"]]) == 0
    capsys.readouterr()
    for command, sentence in (
        (["compare", runs["plain"], runs["causal"]], "the other causal; replay both with the same"),
        (["gate", runs["causal"], "--baseline", runs["plain"]], "--sessions differs: causal and"),
    ):
        assert run_command(["replay", *command]) == 64
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1
    # Runs of the same mode are paired, although their windows have different lengths.
    lengths = {read_summary(Path(runs[name])).window.length_s for name in ("causal", "again")}
    assert len(lengths) == 2
    assert run_command(["replay", "compare", runs["causal"], runs["again"]]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "paired by request id: 60 requests" in text
    assert "The runs have causal sessions" in text
