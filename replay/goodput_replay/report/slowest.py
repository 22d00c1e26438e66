"""The slowest requests of a run, with the fields that identify them in a server's log."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.slo.judging import JudgementKind
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.runs.chosen_rows import read_rows

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_replay.runs.columns import RunColumns

__all__ = ["SlowRequest", "SlowestReader"]

_SHOWN: Final = 20
_COLUMNS: Final = ("request_id", "replica", "miss_reasons", "detail")


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


class SlowestReader:
    """Finds the requests with the longest time from their scheduled arrival, misses first.

    It is a `PartReader`.

    Args:
        folder: the run's folder.
        start_s: start of the window, seconds since the run's time zero.
    """

    def __init__(self, folder: Path, *, start_s: float) -> None:
        self._folder = folder
        self._start_s = start_s
        self._worst: list[tuple[tuple[bool, float, int], SlowRequest]] = []
        self.finished = False

    def add(self, part: RunColumns) -> None:
        """Add the next part."""
        total_ns = np.nan_to_num(part.end_ns - part.scheduled_ns, nan=-1.0)
        missed = part.of_kind(JudgementKind.MISSED)
        for index in np.lexsort((-total_ns, ~missed))[:_SHOWN].tolist():
            order = (not missed[index], -float(total_ns[index]), int(part.row[index]))
            self._worst.append((order, _make_row(part, index, self._start_s)))
        self._worst.sort(key=itemgetter(0))
        del self._worst[_SHOWN:]

    def end_pass(self) -> None:
        """End the only pass."""
        self.finished = True

    def slowest(self) -> tuple[SlowRequest, ...]:
        """Return the requests, once the reader has finished.

        Raises:
            InputError: see `open_records`.
        """
        rows = [row for (_, _, row), _ in self._worst]
        texts = read_rows(self._folder, rows, _COLUMNS)
        return tuple(
            replace(request, reasons=tuple(text.pop("miss_reasons")), **text)
            for (_, request), text in zip(self._worst, texts, strict=True)
        )


def _make_row(part: RunColumns, index: int, start_s: float) -> SlowRequest:
    """Return a request without its texts."""
    tbt_us = float(part.tbt_p99_us[index])
    return SlowRequest(
        request_id="",
        slo_class=part.class_names[part.class_code[index]],
        at_s=float(part.scheduled_ns[index]) / NS_PER_S - start_s,
        replica="",
        input_tokens=int(part.input_tokens[index]),
        output_tokens=int(part.output_tokens[index]),
        ttft_ms=_ms(part.ttft_ns[index]),
        tpot_ms=_ms(part.tpot_ns[index]),
        tbt_p99_ms=None if np.isnan(tbt_us) else tbt_us / 1000,
        total_ms=_ms(part.end_ns[index] - part.scheduled_ns[index]),
        outcome=part.outcome(index),
        reasons=(),
        detail="",
    )


def _ms(ns: float) -> float | None:
    return None if np.isnan(ns) else float(ns) / NS_PER_MS
