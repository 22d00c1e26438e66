"""Merged shards are judged like the undivided run, and a lost shard is never a verdict."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from asyncio.subprocess import PIPE
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.records import finished_request
from tests.builders.traces import steady_rows
from tests.replay.compare.recorded import CHAT
from tests.replay.conftest import INFO, SyntheticRun, make_run, write_run
from tests.replay.sending.builders import make_planned
from tests.replay.sending.conftest import trace_of
from tests.replay.sending.stand_ins import DONE, StandIn, finish, running, tokens, usage

from goodput_core.dispatch import run_command
from goodput_core.errors import InputError
from goodput_core.replay_job import decode_message
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import parse_objective
from goodput_core.slo.verdict import Reason, VerdictKind
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.compare.runs import load_run
from goodput_replay.merge import merge_runs
from goodput_replay.runs.files import SERVER_METRICS_FILE
from goodput_replay.runs.record_rows import read_judged
from goodput_replay.runs.server_metrics import (
    ServerMetrics,
    read_server_metrics,
    write_server_metrics,
)
from goodput_replay.runs.summary import SenderSummary, ShardSummary, StallSummary
from goodput_replay.runs.summary_builder import RunInfo, build_summary
from goodput_replay.shares import Share
from goodput_replay.storage import upload_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tests.replay.sending.builders import WriteTrace

    from goodput_core.slo.record import RequestRecord

__all__ = ["trace_of"]


def write_shards(
    folder: Path,
    info: RunInfo,
    records: Iterable[RequestRecord],
    count: int,
    change: Callable[[int, RunInfo], RunInfo] = lambda _, info: info,
) -> list[Path]:
    """Divide a run into shards and write their folders; `change` changes the info of each."""
    parts: list[list[RequestRecord]] = [[] for _ in range(count)]
    for record in records:
        planned = make_planned(request_id=record.request_id)
        (index,) = (n for n in range(count) if Share(index=n, count=count).holds(planned))
        parts[index].append(record)
    folders = []
    for index, part in enumerate(parts):
        shard = ShardSummary(
            number=index + 1, count=count, rows_planned=info.rows_planned, warmup_rows=0,
            window_start_ns=info.window_start_ns, window_ns=info.window_ns, clock_error_ms=None,
        )  # fmt: skip
        own = replace(
            info, run=replace(info.run, shard=shard), rows_planned=len(part), warmup_rows=0
        )
        folders.append(folder / f"shard-{index + 1}")
        write_run(folders[-1], change(index, own), part)
    return folders


def steady(count: int = 600, *, missed: int = 0) -> list[RequestRecord]:
    return [
        finished_request(
            request_id=f"r{n}",
            scheduled_ns=n * NS_PER_S // 10,
            ttft_ms=800 if n % 10 < missed else 100,
        )
        for n in range(count)
    ]


CHAT_INFO = replace(INFO, slo=CHAT, window_ns=60 * NS_PER_S, rows_planned=600, warmup_rows=0)


@settings(max_examples=examples(12), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 5),
    unsent=st.sampled_from([0, 0, 7]),
    start_ns=st.sampled_from([0, 1_234_567]),
)
def test_merged_shards_are_judged_like_the_undivided_run(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, unsent: int, start_ns: int
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    run: SyntheticRun = make_run(seed=seed, window_s=60, unsent=unsent)
    info = replace(run.info, warmup_rows=0, window_start_ns=start_ns)
    records = [r for r in run.records if r.scheduled_ns >= start_ns]
    info = replace(info, rows_planned=len(records))
    whole = write_run(folder / "whole", info, records)
    merged = merge_runs(
        write_shards(folder, info, records, count)[::-1], folder / "merged", report=False
    )
    for field in ("verdict", "validity", "overall", "classes", "window", "errors", "trace",
                  "promises", "default_class", "outage_s", "other_errors"):  # fmt: skip
        assert getattr(merged, field) == getattr(whole, field), field
    rows = [{row.record.request_id: replace(row.record, sender=0) for row in read_judged(f)}
            for f in (folder / "whole", folder / "merged")]  # fmt: skip
    assert rows[0] == rows[1]
    assert [one.shard for one in merged.client.senders] == list(range(1, count + 1))


def stall_of(sender: int) -> tuple[StallSummary, ...]:
    return (StallSummary(start_s=0, end_s=60, stalled_s=59.99, sender=sender),)


SENDER = SenderSummary(
    shard=None, requests=1, cpu_s=1, peak_in_flight=3, loop_lag_p99_ms=1, loop_lag_max_ms=2
)


@pytest.mark.parametrize("stalled", [0, 1, None])
def test_a_stall_of_one_shard_excuses_only_its_own_requests(
    tmp_path: Path, stalled: int | None
) -> None:
    """Both shards miss; a shard has two senders, of which the second one stalled."""
    records = [replace(one, sender=1) for one in steady(missed=10)]

    def change(index: int, info: RunInfo) -> RunInfo:
        client = replace(info.client, senders=(SENDER, SENDER))
        if index == stalled:
            client = replace(client, stalls=stall_of(1))
        return replace(info, client=client)

    shards = write_shards(tmp_path, CHAT_INFO, records, 2, change)
    merged = merge_runs(shards, tmp_path / "merged", report=False)
    assert {row.record.sender for row in read_judged(tmp_path / "merged")} == {1, 3}
    assert [stall.sender for stall in merged.client.stalls] == (
        [] if stalled is None else [1 + 2 * stalled]
    )
    assert [one.shard for one in merged.client.senders] == [1, 1, 2, 2]
    assert merged.client.peak_in_flight == 2 * INFO.client.peak_in_flight
    # Half of the requests stay slow, so the verdict is the same without the stalls.
    assert merged.verdict.kind is VerdictKind.FAIL


def test_stalls_of_all_shards_that_decide_make_the_merged_run_invalid(tmp_path: Path) -> None:
    def change(_: int, info: RunInfo) -> RunInfo:
        return replace(info, client=replace(info.client, stalls=stall_of(0)))

    shards = write_shards(tmp_path, CHAT_INFO, steady(missed=10), 2, change)
    merged = merge_runs(shards, tmp_path / "merged", report=False)
    assert merged.verdict.reason is Reason.CLIENT_LAG_DECIDES


def of_run(**fields: Any) -> Callable[[int, RunInfo], RunInfo]:
    """Change fields of the second shard's `run`."""
    return lambda index, info: replace(info, run=replace(info.run, **fields)) if index else info


def of_part(part: str, **fields: Any) -> Callable[[int, RunInfo], RunInfo]:
    def change(index: int, info: RunInfo) -> RunInfo:
        changed: Any = replace(getattr(info, part), **fields)
        return replace(info, **{part: changed}) if index else info

    return change


STRICT = replace(CHAT, classes=(replace(CHAT.classes[0], ttft_ms=400),))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param(of_part("trace", digest="sha256:00"), "the trace differs", id="trace"),
        pytest.param(
            of_part("trace", transforms=("--speed 2",)), "the trace selection differs", id="speed"
        ),
        pytest.param(of_run(salt="y"), "--salt differs: 2f9c and y", id="salt"),
        pytest.param(
            of_run(started_at="2026-03-04T05:06:08Z"), "the start differs", id="start"
        ),
        pytest.param(of_run(goodput_version="0.0.1"), "the version of Goodput", id="version"),
        pytest.param(of_run(retries=2), "--retries differs: 0 and 2", id="retries"),
        pytest.param(of_part("target", model="other"), "the model differs", id="model"),
        pytest.param(
            lambda i, info: replace(info, slo=STRICT) if i else info, "ttft_ms of chat", id="slo"
        ),
        pytest.param(
            lambda i, info: replace(info, confidence=0.9) if i else info, "--confidence", id="conf"
        ),
        pytest.param(
            lambda i, info: replace(
                info, run=replace(info.run, shard=replace(info.run.shard, count=3))
            ) if i else info,
            "the number of shards differs: 2 and 3", id="count",
        ),
    ],
)  # fmt: skip
def test_shards_of_different_runs_are_not_merged(
    tmp_path: Path, change: Callable[[int, RunInfo], RunInfo], problem: str
) -> None:
    shards = write_shards(tmp_path, CHAT_INFO, steady(), 2, change)
    with pytest.raises(InputError, match=problem):
        merge_runs(shards, tmp_path / "merged", report=False)
    assert not (tmp_path / "merged").exists()


def test_a_shard_that_is_missing_or_given_twice_is_named(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, CHAT_INFO, steady(), 3)
    with pytest.raises(InputError, match="shard 2 of 3 is missing; name the folder of every"):
        merge_runs([shards[0], shards[2]], tmp_path / "merged")
    with pytest.raises(InputError, match=r"shard 2 of 3 again, after .*shard-2; name each shard"):
        merge_runs([*shards, shards[1]], tmp_path / "merged")
    write_run(tmp_path / "whole", CHAT_INFO, steady())
    with pytest.raises(InputError, match="not a shard; merge only replays with --shard"):
        merge_runs([tmp_path / "whole"], tmp_path / "merged")
    with pytest.raises(InputError, match="is in the folder of the shard"):
        merge_runs(shards, shards[0] / "merged")
    assert not (shards[0] / "merged").exists()
    (shards[0] / "summary.json").unlink()
    with pytest.raises(InputError, match=r"shard-1/summary.json: No such file or directory"):
        merge_runs(shards, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_shards_that_do_not_make_up_the_trace_are_not_merged(tmp_path: Path) -> None:
    info = replace(CHAT_INFO, rows_planned=601)
    shards = write_shards(tmp_path, info, steady(), 2)
    with pytest.raises(
        InputError, match="the shards have 600 rows together, and the trace has 601"
    ):
        merge_runs(shards, tmp_path / "merged")


def test_a_shard_with_the_records_of_another_run_is_rejected(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "a", CHAT_INFO, steady(missed=1), 2)
    others = write_shards(tmp_path / "b", CHAT_INFO, steady(missed=2), 2)
    (shards[1] / "records.parquet").write_bytes((others[1] / "records.parquet").read_bytes())
    with pytest.raises(InputError, match=r"shard-2/records\.parquet: the records are not those of"):
        merge_runs(shards, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("missed", [0, 10], ids=["would-pass", "would-fail"])
@pytest.mark.parametrize("lost", ["missing", "ended early"])
def test_a_lost_shard_makes_the_merged_run_invalid(tmp_path: Path, lost: str, missed: int) -> None:
    stopped = of_run(complete=False, abort_reason="interrupted by SIGTERM")
    shards = write_shards(
        tmp_path, CHAT_INFO, steady(missed=missed), 2,
        stopped if lost == "ended early" else lambda _, info: info,
    )  # fmt: skip
    if lost == "missing":
        shards.pop()
    merged = merge_runs(shards, tmp_path / "merged", partial=True)
    assert (merged.verdict.kind, merged.verdict.reason) == (
        VerdictKind.INVALID,
        Reason.INCOMPLETE,
    )
    expected = (
        "shard 2 of 2 is missing"
        if lost == "missing"
        else ("shard 2 of 2 ended early (interrupted by SIGTERM)")
    )
    assert expected in merged.verdict.sentence
    if lost == "missing":
        assert merged.validity.unsent_rows > 200
        assert "rows were never sent" in merged.verdict.sentence
    assert merged.overall.requests == sum(
        1 for shard in shards for row in read_judged(shard) if not row.warmup
    ), "the records of the others are kept"


@pytest.mark.parametrize(
    ("error_ms", "valid"), [(None, True), (900.0, True), (4000.0, False)], ids=str
)
def test_a_shard_whose_clock_may_be_far_off_makes_the_merged_run_invalid(
    error_ms: float | None, valid: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(index: int, info: RunInfo) -> RunInfo:
        assert info.run.shard is not None
        shard = replace(info.run.shard, clock_error_ms=error_ms if index else 1.0)
        return replace(info, run=replace(info.run, shard=shard))

    info = replace(INFO, slo=CHAT, window_ns=60 * NS_PER_S, rows_planned=600, warmup_rows=0)
    shards = write_shards(tmp_path, info, steady(), 2, change)
    merged = merge_runs(shards, tmp_path / "merged")
    verdict = merged.verdict
    assert [sender.clock_error_ms for sender in merged.client.senders] == [1.0, error_ms]
    warning = "warning: shard 2 of 2 is from a machine whose clock error is not known"
    assert (warning in capsys.readouterr().err) is (error_ms is None)
    assert verdict.kind is (VerdictKind.PASS if valid else VerdictKind.INVALID)
    assert ("the clock of shard 2 of 2 may be wrong by 4 s" in verdict.sentence) is not valid


def scraped(pages: dict[str, float], *, failed: int = 0) -> ServerMetrics:
    """Scrape pages ten times, `failed` times of them in vain."""
    metrics = ServerMetrics(every_ns=2 * NS_PER_S, metrics=("mine",))
    for page, running_requests in pages.items():
        for scrape in range(10):
            at_ns = 2 * scrape * NS_PER_S
            if scrape < failed:
                metrics.add_failure(page, at_ns, "responded with status 503")
            else:
                metrics.add(page, at_ns, {"running_requests": running_requests, "mine": 1.0})
    return metrics


def test_a_server_that_several_shards_scraped_is_in_the_merged_run_once(tmp_path: Path) -> None:
    info = replace(INFO, slo=CHAT, window_ns=60 * NS_PER_S, rows_planned=600, warmup_rows=0)
    shards = write_shards(tmp_path, info, steady(), 3)
    write_server_metrics(shards[0] / SERVER_METRICS_FILE, scraped({"both": 1.0}, failed=4))
    write_server_metrics(shards[2] / SERVER_METRICS_FILE, scraped({"both": 2.0, "third": 3.0}))
    merge_runs(shards, tmp_path / "merged", report=True)
    merged = read_server_metrics(tmp_path / "merged")
    assert merged is not None
    assert list(merged.sources) == ["both", "third"]
    assert [source.scrapes for source in merged.sources.values()] == [10, 10]
    for page, value in (("both", 2.0), ("third", 3.0)):
        times, values = merged.values(page, "running_requests")
        assert (list(times), set(values)) == ([2 * n * NS_PER_S for n in range(10)], {value})
    assert "Running in the server" in (tmp_path / "merged" / "report.html").read_text()


def test_a_merged_run_is_judged_although_the_disk_has_no_space_for_the_server_metrics(
    tmp_path: Path, tiny_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = replace(INFO, slo=CHAT, window_ns=60 * NS_PER_S, rows_planned=600, warmup_rows=0)
    shards = write_shards(tmp_path, info, steady(), 2)
    metrics, noise = ServerMetrics(every_ns=NS_PER_S), random.Random(1)
    for second in range(200_000):
        metrics.add("page", second * NS_PER_S, {"running_requests": noise.random()})
    write_server_metrics(shards[0] / SERVER_METRICS_FILE, metrics)
    size = (shards[0] / SERVER_METRICS_FILE).stat().st_size
    assert size > os.statvfs(tiny_disk).f_bavail * 4096 - (9 << 20), "more than the reserve leaves"
    out = tiny_disk / "merged"
    assert run_command(["replay", "merge", *map(str, shards), "-o", str(out), "--no-report"]) == 0
    printed = capsys.readouterr().err
    assert "server_metrics.parquet.partial: the server's metrics were not written" in printed
    assert "No space left on device" in printed
    assert {path.name for path in out.iterdir()} == {"records.parquet", "summary.json"}
    assert load_run(out).summary.overall.requests == 600


def test_shards_without_scrapes_make_a_run_without_server_metrics(tmp_path: Path) -> None:
    info = replace(INFO, slo=CHAT, window_ns=60 * NS_PER_S, rows_planned=600, warmup_rows=0)
    merge_runs(write_shards(tmp_path, info, steady(), 2), tmp_path / "merged")
    assert not (tmp_path / "merged" / SERVER_METRICS_FILE).exists()


def test_a_shard_alone_gets_no_verdict(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, CHAT_INFO, steady(missed=10), 2)
    summary = json.loads((shards[0] / "summary.json").read_text())
    assert (summary["verdict"]["kind"], summary["verdict"]["reason"]) == ("INCONCLUSIVE", "Shard")
    assert summary["validity"]["valid"]
    with pytest.raises(InputError, match="only shard 1 of 2; join all shards with `replay merge`"):
        load_run(shards[0])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        pytest.param(2, "and without them chat would be PASS, not FAIL", id="half"),
        pytest.param(4, "chat would be without a judged request, not FAIL", id="all"),
        pytest.param(0, "", id="none"),
    ],
)
def test_shards_with_a_wrong_key_are_no_verdict_on_the_service(
    tmp_path: Path, wrong: int, sentence: str
) -> None:
    records = [
        replace(
            record,
            outcome=Outcome.ERROR,
            status=401,
            first_token_ns=None,
            last_token_ns=None,
            output_tokens=0,
        )
        if any(
            Share(index=n, count=4).holds(make_planned(request_id=record.request_id))
            for n in range(wrong)
        )
        else record
        for record in steady(1800)
    ]
    info = replace(CHAT_INFO, window_ns=180 * NS_PER_S, rows_planned=1800)
    shards = write_shards(tmp_path, info, records, 4)
    reasons = [json.loads((s / "summary.json").read_text())["verdict"]["reason"] for s in shards]
    assert reasons == ["ClientError"] * wrong + ["Shard"] * (4 - wrong)
    merged = merge_runs(shards, tmp_path / "merged", report=False)
    assert merged.verdict.reason is (Reason.CLIENT_ERROR if wrong else Reason.ATTAINED)
    assert sentence in merged.verdict.sentence


def test_a_shard_whose_machine_never_connects_makes_the_merged_run_invalid(tmp_path: Path) -> None:
    records = [
        replace(
            record,
            outcome=Outcome.ERROR,
            detail="could not connect: No route to host",
            sent_ns=None,
            first_token_ns=None,
            last_token_ns=None,
            output_tokens=0,
        )
        if Share(index=1, count=3).holds(make_planned(request_id=record.request_id))
        else record
        for record in steady()
    ]
    shards = write_shards(tmp_path, CHAT_INFO, records, 3)
    merged = merge_runs(shards, tmp_path / "merged", report=False)
    assert merged.verdict.reason is Reason.INCOMPLETE
    assert "shard 2 of 3 could not connect to the target" in merged.verdict.sentence


def test_the_merged_run_can_be_judged_again_from_its_folder(tmp_path: Path) -> None:
    objective = parse_objective("90%")
    slo = replace(CHAT, classes=(replace(CHAT.classes[0], objective=objective),))
    info = replace(CHAT_INFO, slo=slo)
    shards = write_shards(tmp_path, info, steady(missed=2), 4)
    merged = merge_runs(shards, tmp_path / "merged", report=False)
    assert merged.verdict.kind is VerdictKind.FAIL
    again = build_summary(tmp_path / "merged", replace(info, client=merged.client))
    assert (again.verdict, again.classes) == (merged.verdict, merged.classes)
    assert load_run(tmp_path / "merged").counts.totals[1] == merged.overall.good


def test_the_command_prints_the_verdict_and_exits_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = [str(s) for s in write_shards(tmp_path, CHAT_INFO, steady(missed=10), 2)]
    out = str(tmp_path / "merged")
    assert run_command(["replay", "merge", *shards, "-o", out, "--gate"]) == 1
    assert "FAIL (BelowObjective) chat: 0 of 600" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "merged" / "report.html").is_file()
    assert run_command(["replay", "merge", *shards, "-o", out]) == 64
    assert "the folder is not empty" in capsys.readouterr().err
    assert run_command(["replay", "merge", *shards, "-o", out, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["shard"] is None
    assert run_command(["replay", "merge", *shards, "-o", shards[0], "--force"]) == 64
    assert "is one of the shards; name another" in capsys.readouterr().err
    assert run_command(["replay", "gate", shards[0]]) == 64
    assert "only shard 1 of 2" in capsys.readouterr().err


async def replay(folder: Path, *options: object) -> tuple[int | None, str]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "goodput_core", "replay", *map(str, options),
        cwd=folder, stdout=PIPE, stderr=PIPE, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    _, err = await asyncio.wait_for(child.communicate(), 60)
    return child.returncode, err.decode()


def test_the_verdict_is_also_written_for_the_pod_and_the_run_uploaded(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, CHAT_INFO, steady(missed=9), 2)
    store = f"file://{tmp_path}/store"
    for number, shard in enumerate(shards):
        upload_folder(shard, f"{store}/shard-{number}")
    out, result = tmp_path / "merged", tmp_path / "result"
    words = ["replay", "merge", f"{store}/shard-0", f"{store}/shard-1", "-o", str(out)]
    words += ["--upload", f"{store}/merged", "--result-file", str(result), "--no-report"]
    assert run_command(words) == 0
    found = decode_message(result.read_text())
    assert found is not None
    assert (found.verdict, found.reason) == (VerdictKind.FAIL, Reason.BELOW_OBJECTIVE.value)
    assert (found.requests, found.good, found.total, found.valid) == (600, 60, 600, True)
    assert load_run(tmp_path / "store/merged").summary == load_run(out).summary


@pytest.mark.slow
async def test_shards_that_start_at_one_instant_make_one_run(
    trace_of: WriteTrace, tmp_path: Path
) -> None:
    trace = trace_of(steady_rows(60, provided_session_id=None))
    answer = lambda count: [*tokens(count), finish(), usage(count), DONE]  # noqa: E731
    async with running(StandIn(answer=answer)) as url:
        start_s = int(time.time()) + 15
        common = ["--trace", trace, "--target", url, "--ttft", "5s", "--tpot", "5s"]
        common += ["--objective", "90%", "--start-at", start_s, "--salt", "x", "--warmup", 5]
        ended = await asyncio.gather(
            replay(tmp_path, *common, "--shard", "1/2", "--out", "one"),
            replay(tmp_path, *common, "--shard", "2/2", "--out", "two", "--workers", "2"),
        )
    assert [code for code, _ in ended] == [0, 0], ended
    assert all("the run starts at 20" in err for _, err in ended)
    merged = merge_runs([tmp_path / "two", tmp_path / "one"], tmp_path / "merged")
    rows = list(read_judged(tmp_path / "merged"))
    assert sorted(row.record.request_id for row in rows) == sorted(f"row-{n}" for n in range(60))
    assert sum(row.warmup for row in rows) == 5
    assert [one.shard for one in merged.client.senders] == [1, 2, 2]
    assert merged.window.rows_planned == merged.window.rows_sent == 55
    assert merged.validity.valid
    lags = [row.record.lag_ns for row in rows if row.record.lag_ns is not None]
    assert len(lags) == 60
    assert min(lags) > -NS_PER_MS
    assert merged.run.started_at.startswith("20")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--shard", "1/2", "--salt", "x"), "--shard needs --start-at"),
        (("--shard", "1/2", "--start-at", "4102444800"), "--shard needs --salt"),
        (("--start-at", "1000"), "--start-at: 1970-01-01T00:16:40.000000+00:00 passed"),
        (("--start-at", "4102444800"), "is more than a week ahead"),
        (("--start-at", "2026-03-04T05:06:07"), "is not an instant"),
        (("--start-at", "tomorrow"), "is not an instant"),
        (("--shard", "3/2"), "is not a shard"),
        (("--shard", "1/2", "--gate"), "--gate and --shard are mutually exclusive"),
        (("--shard", "1/2", "--concurrency", "3"), "--shard and --concurrency are mutually"),
    ],
)
def test_options_that_would_not_make_one_run_are_rejected(
    trace_of: WriteTrace, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...], problem: str,
) -> None:  # fmt: skip
    trace = trace_of(steady_rows(2))
    command = ["replay", "--trace", str(trace), "--target", "http://127.0.0.1:1"]
    code = run_command([*command, "--out", str(tmp_path / "run"), *options])
    assert (code, (tmp_path / "run").exists()) == (64, False)
    assert problem in capsys.readouterr().err


def test_a_dry_run_states_the_requests_of_the_shard(
    trace_of: WriteTrace, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(trace_of(steady_rows(100)))
    found = []
    for number in (1, 2):
        command = ["replay", "--trace", trace, "--dry-run", "--json", "--shard", f"{number}/2"]
        assert run_command(command) == 0
        totals = json.loads(capsys.readouterr().out)
        assert totals["requests"] == 100
        found.append(totals["requests_of_shard"])
    assert sum(found) == 100
