"""A client process that is stopped while responses arrive does not blame the service."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import DEVNULL
from typing import TYPE_CHECKING

from tests.builders.traces import steady_rows
from tests.replay.sending.stand_ins import DONE, StandIn, finish, running, tokens, usage

from goodput_core.slo.verdict import Reason, VerdictKind
from goodput_replay.runs.summary import read_summary
from goodput_replay.runs.summary_builder import read_stalls

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.replay.sending.builders import WriteTrace

REQUESTS, LENGTH = 20, 100
SLO = """
classes:
  - {name: chat, ttftMs: 5000, tpotMs: 5000, tbtP99Ms: 250, objective: "99%"}
"""


async def test_stalls_of_the_client_that_decide_a_verdict_make_it_invalid(
    trace_of: WriteTrace, tmp_path: Path
) -> None:
    """The client is stopped twice for 0.5 s while each request waits for a token every 20 ms."""
    all_arrived, arrived = asyncio.Event(), 0

    def answer(count: int) -> Iterable[bytes]:
        nonlocal arrived
        arrived += count > 1  # not a probe
        if arrived == REQUESTS:
            all_arrived.set()
        return [*tokens(count), finish(), usage(count), DONE]

    (tmp_path / "slo.yaml").write_text(SLO)
    trace = trace_of(steady_rows(REQUESTS, input_tokens=8, output_tokens=LENGTH))
    async with running(StandIn(answer=answer, pause_s=0.02)) as url:
        command = ["-m", "goodput_core", "replay", "--trace", trace, "--target", url]
        command += ["--slo", tmp_path / "slo.yaml", "--out", tmp_path / "run", "--gate"]
        child = await asyncio.create_subprocess_exec(
            sys.executable, *map(str, command), "--no-report", stdout=DEVNULL, stderr=DEVNULL
        )
        await all_arrived.wait()
        for _ in range(2):
            await asyncio.sleep(0.2)
            child.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.5)
            child.send_signal(signal.SIGCONT)
        code = await child.wait()
    summary = read_summary(tmp_path / "run")
    assert code == VerdictKind.INVALID.exit_code
    assert summary.overall.outcomes == {"ok": REQUESTS}
    assert summary.overall.misses == {"tbt": REQUESTS}
    stalls = read_stalls(summary.client)[0]
    assert len(stalls) >= 2
    assert stalls.total_ns >= 900_000_000
    assert "without the client's lag (late sends and stalls) chat would be" in (
        summary.verdict.sentence
    )
    if summary.validity.lag_ms is not None and summary.validity.lag_ms.p99 < 100:
        assert summary.verdict.reason is Reason.CLIENT_LAG_DECIDES
