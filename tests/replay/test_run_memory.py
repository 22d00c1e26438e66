"""A run four times as long needs hardly more memory to be summarised and reported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from tests.replay.conftest import write_run

from goodput_replay.runs.files import RECORDS_FILE, digest_records
from goodput_replay.runs.summary import write_summary

if TYPE_CHECKING:
    from pathlib import Path

    from tests.replay.conftest import SyntheticRun

_CHILD = """
import os, re, sys
os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # as the command does
from pathlib import Path
import pyarrow
# On a busy machine, threads of Arrow that read ahead would hold more parts in memory.
pyarrow.set_cpu_count(1)
pyarrow.set_io_thread_count(1)
from goodput_core.units import NS_PER_S
from goodput_replay.report.in_flight import InFlightSearch
from goodput_replay.report.run_report import render
from goodput_replay.runs.columns import ColumnParts
from goodput_replay.runs.measures import RunMeasures
from goodput_replay.statistics.rank_search import RankSearch

# With the limits of a real run, memory grows up to 300,000 requests.
ColumnParts.__init__.__kwdefaults__["part_rows"] = 4096
InFlightSearch.__init__.__kwdefaults__.update(max_kept=1 << 14, bins=1 << 10)
RankSearch.__init__.__kwdefaults__.update(max_kept=1 << 14, max_bins=1 << 14)

def peak_bytes():
    # Not that of getrusage, which includes the process that started this one.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

small, folder = map(Path, sys.argv[1:])
render(small)  # imports, and memory of the first use
before = peak_bytes()
names = ["interactive", "batch"]
measures = RunMeasures(folder, names, window_start_ns=0, window_ns=300 * NS_PER_S)
assert measures.lag is not None
render(folder)
print(measures.lag.count, peak_bytes() - before)
"""


def test_a_run_four_times_as_long_needs_hardly_more_memory(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    summary = write_run(tmp_path / "small", synthetic_run.info, synthetic_run.records)
    table = pq.read_table(tmp_path / "small" / RECORDS_FILE)

    def measure(count: int) -> tuple[int, int]:
        """Repeat the records, and return their number and the added peak memory."""
        folder = tmp_path / str(count)
        folder.mkdir()
        with pq.ParquetWriter(folder / RECORDS_FILE, table.schema) as writer:
            for _ in range(-(-count // table.num_rows)):
                writer.write_table(table)
        write_summary(folder, replace(summary, records_digest=digest_records(folder)))
        output = subprocess.run(
            [sys.executable, "-c", _CHILD, tmp_path / "small", folder],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        ).stdout
        rows, added = map(int, output.split())
        return rows, added

    (rows, once), (more_rows, four_times) = measure(15_000), measure(60_000)
    assert four_times - once < 60 * (more_rows - rows), "the columns alone take 112 bytes per row"
