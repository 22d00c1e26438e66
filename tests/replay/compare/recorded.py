"""Run folders with known requests, for comparisons."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from tests.builders.records import finished_request
from tests.replay.conftest import INFO, write_run

from goodput_core.slo.conformance import Deviation
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import SLOClass
from goodput_core.units import NS_PER_S
from goodput_replay.compare.gate_command import main
from goodput_replay.compare.recording import ABRecording, RecordedPair
from goodput_replay.runs.prompt_kind import PromptKind
from goodput_replay.runs.slo import SLOClasses
from goodput_replay.runs.summary import read_summary, write_summary

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    import pytest

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.runs.summary import RunSummary

__all__ = ["CHAT", "chat_run", "gate", "make_recording", "pairs", "spread"]

CHAT = SLOClasses(
    classes=(SLOClass(name="chat", ttft_ms=500, tpot_ms=50, objective=Fraction("0.99")),),
    default="chat",
)


_written: dict[str, dict[str, bytes]] = {}
"""Files of earlier runs by their load. Judging a run takes much longer than copying it."""


def chat_run(
    folder: Path,
    *,
    missed: Collection[int] = (),
    cancelled: Collection[int] = (),
    absent: Collection[int] = (),
    rejected: Collection[int] = (),
    unauthorised: Collection[int] = (),
    late: Collection[int] = (),
    short: Collection[int] = (),
    unstreamed: Collection[int] = (),
    cut: Collection[int] = (),
    seconds: int = 60,
    per_s: int = 10,
    ttft_ms: float = 100,
    lag_ms: float = 0,
    slo: SLOClasses = CHAT,
    revision: str = "",
    prompt_ratio: float | None = None,
    **changes: Any,
) -> Path:
    """Record an even load of class chat and return the folder.

    Args:
        folder: the run's folder.
        missed: numbers of the requests with a TTFT of 800 ms.
        cancelled: numbers of the requests that the trace cancelled.
        absent: numbers of the requests without a record.
        rejected: numbers of the requests that the server rejected with 400.
        unauthorised: numbers of the requests that the server rejected with 401.
        late: numbers of the requests with a TTFT of 504 ms, 495 ms of it after the send.
        short: numbers of the requests whose output the server ended early, against the request.
        unstreamed: numbers of the requests whose response was not streamed.
        cut: numbers of the requests whose response the client's time limit ended.
        seconds: length of the window.
        per_s: requests per second.
        ttft_ms: TTFT of the others.
        lag_ms: send lag of every request.
        slo: classes of the run.
        revision: revision that served every request.
        prompt_ratio: prompt tokens that the target counted, divided by those of the trace; None if
            it counted none.
        changes: fields of the run's info.
    """
    # Two runs never start at the same microsecond, and equal starts mean copies of one run.
    microsecond = zlib.crc32("/".join(folder.parts[-2:]).encode()) % 1_000_000
    run = replace(INFO.run, started_at=f"2026-03-04T05:06:07.{microsecond:06}+00:00")
    run = changes.pop("run", run)
    numbers = (missed, cancelled, absent, rejected, unauthorised, late, short, unstreamed, cut)
    load = (seconds, per_s, ttft_ms, lag_ms, revision, prompt_ratio)
    key = repr((*(sorted(one) for one in numbers), *load, slo, sorted(changes.items())))
    if (files := _written.get(key)) is not None:
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        write_summary(folder, replace(read_summary(folder), run=run))
        return folder
    total = seconds * per_s
    records = [
        _record(
            number,
            number * NS_PER_S // per_s,
            ttft_ms=800 if number in missed else 504 if number in late else ttft_ms,
            lag_ms=9 if number in late else lag_ms,
            cancelled=number in cancelled,
            rejected_with=400 if number in rejected else 401 if number in unauthorised else None,
            short=number in short,
            unstreamed=number in unstreamed,
            cut=number in cut,
        )
        for number in range(total)
        if number not in absent
    ]
    info = replace(
        INFO,
        run=run,
        slo=slo,
        window_ns=seconds * NS_PER_S,
        rows_planned=total - len(absent),
        warmup_rows=0,
    )
    if revision:
        records = [replace(record, revision=revision) for record in records]
    if prompt_ratio is not None:
        info = replace(info, target=replace(info.target, prompt=PromptKind.INVENTED_WORDS))
        records = [
            replace(record, reported_input_tokens=round(prompt_ratio * record.input_tokens))
            for record in records
        ]
    write_run(folder, replace(info, **changes), records)
    _written[key] = {path.name: path.read_bytes() for path in folder.iterdir()}
    return folder


def _record(
    number: int,
    at_ns: int,
    *,
    ttft_ms: float,
    lag_ms: float,
    cancelled: bool,
    rejected_with: int | None,
    short: bool,
    unstreamed: bool,
    cut: bool,
) -> RequestRecord:
    fields: dict[str, Any] = {"request_id": f"r{number:05}", "input_tokens": 100}
    if cancelled:
        fields |= {"outcome": Outcome.CANCELLED, "cancel_after_ns": 50_000_000}
    if short:
        fields |= {
            "output_tokens": 5,
            "pinned_output_tokens": 11,
            "deviations": (Deviation.ENDED_EARLY,),
        }
    if cut:
        fields["outcome"] = Outcome.TIMEOUT
    if unstreamed:
        fields |= {
            "outcome": Outcome.ERROR,
            "status": 200,
            "first_token_ns": None,
            "last_token_ns": None,
            "output_tokens": 0,
            "deviations": (Deviation.NOT_STREAMED,),
        }
    if rejected_with is not None:
        fields |= {
            "outcome": Outcome.ERROR,
            "status": rejected_with,
            "detail": f"HTTP {rejected_with}: no",
            "first_token_ns": None,
            "last_token_ns": None,
            "output_tokens": 0,
        }
    return finished_request(scheduled_ns=at_ns, ttft_ms=ttft_ms, lag_ms=lag_ms, **fields)


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
    """Run `replay gate` with the arguments, and return its exit code and its JSON."""
    code = main([*arguments, "--json"])
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result["exit_code"] == code
    return code, result


def make_recording(
    *, same_build: bool, pairs: int, folder: Path, looks: tuple[int, ...] = (4,)
) -> ABRecording:
    """Record pairs of runs with a few misses in `history`, and return their recording."""
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
