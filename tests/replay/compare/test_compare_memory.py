"""Runs four times as long need hardly more memory to be compared and gated."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.replay.conftest import make_run, write_run

from goodput_replay.runs.files import RECORDS_FILE
from goodput_replay.runs.summary import write_summary
from goodput_replay.runs.summary_builder import RunInfo, build_summary

if TYPE_CHECKING:
    from pathlib import Path

_CHILD = """
import os, re, sys
os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # as the command does
from contextlib import redirect_stdout
from pathlib import Path
from goodput_core.dispatch import run_command
from goodput_replay.compare import pairing
from goodput_replay.runs.columns import ColumnParts
from goodput_replay.statistics.rank_search import RankSearch

# With the limits of real runs, memory grows up to 300,000 requests.
ColumnParts.__init__.__kwdefaults__["part_rows"] = 4096
RankSearch.__init__.__kwdefaults__.update(max_kept=1 << 14, max_bins=1 << 14)
pairing.match.__kwdefaults__["max_waiting"] = 1 << 12

def peak_bytes():
    # Not that of getrusage, which includes the process that started this one.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def run(baseline, candidate):
    pair = [baseline, "--baseline", candidate] if command == "gate" else [baseline, candidate]
    page = [] if command == "gate" else ["--html", folders[0] + ".html"]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        return run_command(["replay", command, *pair, *page, "--json"])

command, *folders = sys.argv[1:]
codes = {run(*folders[:2])}  # imports, and memory of the first use
before = peak_bytes()
codes.add(run(*folders[2:]))
print(peak_bytes() - before, *codes)
"""


def _lengthen(short: Path, long: Path, info: RunInfo, rows: int) -> int:
    """Repeat the records of a run under other ids, and return their number."""
    table = pq.read_table(short / RECORDS_FILE)
    at = table.schema.get_field_index("request_id")
    long.mkdir()
    times = -(-rows // table.num_rows)
    with pq.ParquetWriter(long / RECORDS_FILE, table.schema) as writer:
        for number in range(times):
            ids: Any = pa.array([f"{number}-{one}" for one in table["request_id"].to_pylist()])
            writer.write_table(table.set_column(at, table.schema.field(at), ids))
    rows = times * table.num_rows
    write_summary(long, build_summary(long, replace(info, rows_planned=rows)))
    return rows


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, Path]]:
    """Two runs of about a thousand, 15,000 and 60,000 requests, by their number."""
    folder = tmp_path_factory.mktemp("runs")
    pairs: dict[int, list[Path]] = {}
    for name, lag_ms in (("old", 0.3), ("new", 0.4)):
        run = make_run(lag_ms=lag_ms)
        write_run(folder / name, run.info, run.records)
        pairs.setdefault(len(run.records), []).append(folder / name)
        for size in (15_000, 60_000):
            longer = folder / f"{name}-{size}"
            rows = _lengthen(folder / name, longer, run.info, size)
            pairs.setdefault(rows, []).append(longer)
    return {rows: (old, new) for rows, (old, new) in pairs.items()}


@pytest.mark.parametrize("command", ["compare", "gate"])
def test_runs_four_times_as_long_need_hardly_more_memory(
    sizes: dict[int, tuple[Path, Path]], command: str
) -> None:
    small, once, four_times = sorted(sizes)

    def measure(rows: int) -> int:
        output = subprocess.run(
            [sys.executable, "-c", _CHILD, command, *sizes[small], *sizes[rows]],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        ).stdout
        added, *codes = map(int, output.split())
        assert set(codes) <= ({0} if command == "compare" else {0, 1, 2})
        return added

    added = measure(four_times) - measure(once)
    assert added < 100 * (four_times - once), "the records in memory take 300 bytes per request"
