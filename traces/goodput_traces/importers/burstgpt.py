"""Import BurstGPT: calls of ChatGPT and GPT-4 on Azure over months, as CSV.

Source: Wang et al., "BurstGPT", KDD 2025; github.com/HPMLL/BurstGPT. Times are seconds since the
first day. Responses of zero tokens are failed requests; the import keeps them, as it keeps every
arrival. Only the third part has `Session ID` and `Elapsed time`, and only conversations, not calls
of the API, have a session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_traces.importers.column_map import ARRIVAL, SourceColumn
from goodput_traces.importers.log import FixedLogImporter

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BurstGPTImporter"]


class BurstGPTImporter(FixedLogImporter):
    """Importer of BurstGPT's CSV files."""

    name: ClassVar[str] = "burstgpt"
    summary: ClassVar[str] = "BurstGPT: Timestamp (s), Request tokens, Response tokens (untried)"
    required_columns: ClassVar[frozenset[str]] = frozenset(
        {"Timestamp", "Request tokens", "Response tokens"}
    )
    read_columns = required_columns | {
        "Session ID",
        "Elapsed time",
        "Model",
        "Total tokens",
        "Log Type",
    }
    sources: ClassVar[Mapping[str, SourceColumn]] = {
        ARRIVAL: SourceColumn(names=("Timestamp",), unit="s"),
        "input_tokens": SourceColumn(names=("Request tokens",)),
        "output_tokens": SourceColumn(names=("Response tokens",)),
        "provided_session_id": SourceColumn(names=("Session ID",)),
        "duration_e2e_ms": SourceColumn(names=("Elapsed time",), unit="s"),
        "model_name": SourceColumn(names=("Model",)),
        "request_type": SourceColumn(names=("Log Type",)),
    }
    untried: ClassVar[bool] = True
