"""The published traces, imported completely, keep their counts, clocks, ties and prefix reuse."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from goodput_traces.describe import describe
from goodput_traces.exporters.run import export_trace
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import Clock, HashSemantics
from goodput_traces.importers.run import import_trace

if TYPE_CHECKING:
    from pathlib import Path

AZURE = "azure_llm_2023/AzureLLMInferenceTrace_conv.csv.gz"
MOONCAKE = "mooncake_fast25/conversation_trace.jsonl.gz"
WEKA = "weka_cc/weka_cc_traces_a.jsonl.xz"


def test_azure_conversations_keep_their_ticks(real_traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "azure.parquet"
    result = import_trace((real_traces / AZURE,), out)
    trace = open_trace(out)
    assert (result.format, result.num_rows, trace.num_rows) == ("azure", 19_366, 19_366)
    assert trace.first_ns == 1_700_158_546_680_590_000
    assert trace.metadata.timestamp_resolution_ns == 100
    assert any(row.timestamp_start_unix_ns % 1_000_000 for row in trace.rows())
    found = describe(trace)
    assert found.arrivals is not None
    assert found.arrivals.distinct_instants == 19_366
    assert found.arrivals.peak_1s == 16
    assert (found.prompt.p50, found.prompt.p99) == (1020, 4142)
    assert (found.output.p50, found.output.p99) == (129, 601)


def test_mooncake_conversations_keep_their_ties_and_prefixes(
    real_traces: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mooncake.parquet"
    import_trace((real_traces / MOONCAKE,), out)
    found = describe(open_trace(out))
    assert found.arrivals is not None
    assert found.rows == 12_031
    assert (found.arrivals.distinct_instants, found.arrivals.largest_tie) == (1_180, 28)
    assert found.prefixes.reused == pytest.approx(0.366, abs=0.0005)
    assert found.prefixes.block_sizes == (512,)
    assert found.metadata.hash_semantics is HashSemantics.LAST_PARTIAL
    # An export and a second import give the same rows.
    export_trace(out, tmp_path / "back.jsonl", "mooncake")
    again = tmp_path / "again.parquet"
    import_trace((tmp_path / "back.jsonl",), again)
    assert list(open_trace(again).rows()) == list(open_trace(out).rows())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_weka_sessions_become_session_relative_requests(real_traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "weka.parquet"
    result = import_trace((real_traces / WEKA,), out)
    found = describe(open_trace(out))
    assert (found.rows, found.sessions) == (25_226, 350)
    assert found.metadata.clock is Clock.SESSION_RELATIVE
    assert found.arrivals is None
    # ORIGIN.md names 27; this file has 19 requests with `"out": 0`.
    assert found.floored_output_rows == 19
    assert "25 subagent markers were replaced with the requests nested in them" in result.notes
    assert found.prompt.total > 2**31


def test_reading_a_trace_is_fast(real_traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "azure.parquet"
    import_trace((real_traces / AZURE,), out)
    trace = open_trace(out)
    rates = []
    for _ in range(3):
        start = time.process_time()
        rows = sum(1 for _ in trace.rows())
        rates.append(rows / (time.process_time() - start))
    # A tenth of the rate of an idle machine (250,000/s), so that noise does not fail the test.
    assert max(rates) > 25_000
