"""Names of the files in a run's folder: a contract with whoever reads one."""

from __future__ import annotations

from typing import Final

__all__ = ["DECISIONS_FILE", "PARTIAL_SUFFIX", "RECORDS_FILE", "REPORT_FILE", "SUMMARY_FILE"]

RECORDS_FILE: Final = "records.parquet"
SUMMARY_FILE: Final = "summary.json"
REPORT_FILE: Final = "report.html"
DECISIONS_FILE: Final = "decisions.jsonl"
PARTIAL_SUFFIX: Final = ".partial"
"""Ends the name of a file that is not whole yet."""
