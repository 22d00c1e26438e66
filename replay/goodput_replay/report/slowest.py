"""The slowest requests of a run, with the fields that identify them in a server's log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from goodput_core.slo.judging import JudgementKind
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.runs.records import open_records

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_replay.runs.columns import RunColumns

__all__ = ["SlowRequest", "find_slowest"]

_SHOWN: Final = 20
_COLUMNS: Final = ("request_id", "replica", "miss_reasons", "detail", "tbt_p99_us")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRequest:
    """A row of the table; None stands for a missing measurement."""

    request_id: str
    slo_class: str
    at_s: float
    replica: str
    input_tokens: int
    output_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    tbt_p99_ms: float | None
    total_ms: float | None
    outcome: str
    reasons: tuple[str, ...]
    detail: str


def find_slowest(folder: Path, columns: RunColumns, *, start_s: float) -> tuple[SlowRequest, ...]:
    """Return the requests with the longest time from their scheduled arrival, misses first.

    Args:
        folder: the run's folder.
        columns: judged requests of the run.
        start_s: start of the window, seconds since the run's time zero.
    """
    total_ns = np.nan_to_num(columns.end_ns - columns.scheduled_ns, nan=-1.0)
    missed = columns.of_kind(JudgementKind.MISSED)
    worst = np.lexsort((-total_ns, ~missed))[:_SHOWN]
    texts = _read_texts(folder, columns.row[worst].tolist())
    return tuple(
        _make_row(columns, int(index), text, start_s)
        for index, text in zip(worst, texts, strict=True)
    )


def _make_row(columns: RunColumns, index: int, text: dict[str, Any], start_s: float) -> SlowRequest:
    tbt_us = text["tbt_p99_us"]
    return SlowRequest(
        request_id=text["request_id"],
        slo_class=columns.class_names[columns.class_code[index]],
        at_s=float(columns.scheduled_ns[index]) / NS_PER_S - start_s,
        replica=text["replica"],
        input_tokens=int(columns.input_tokens[index]),
        output_tokens=int(columns.output_tokens[index]),
        ttft_ms=_ms(columns.ttft_ns[index]),
        tpot_ms=_ms(columns.tpot_ns[index]),
        tbt_p99_ms=None if tbt_us is None else tbt_us / 1000,
        total_ms=_ms(columns.end_ns[index] - columns.scheduled_ns[index]),
        outcome=columns.outcome(index),
        reasons=tuple(text["miss_reasons"]),
        detail=text["detail"],
    )


def _read_texts(folder: Path, rows: list[int]) -> list[dict[str, Any]]:
    """Read the texts of a few rows, one row group at a time."""
    texts: dict[int, dict[str, Any]] = {}
    first = 0
    with open_records(folder) as opened:
        for group in range(opened.num_row_groups):
            size = opened.metadata.row_group(group).num_rows
            here = [row for row in rows if first <= row < first + size]
            if here:
                table = opened.read_row_group(group, columns=list(_COLUMNS))
                picked = table.take(pa.array([row - first for row in here])).to_pylist()
                texts.update(zip(here, picked, strict=True))
            first += size
    return [texts[row] for row in rows]


def _ms(ns: float) -> float | None:
    return None if np.isnan(ns) else float(ns) / NS_PER_MS
