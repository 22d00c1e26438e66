"""The most frequent errors of a run.

A server may put an id into each of its error messages. Only some distinct errors are therefore held
in memory: a first pass finds candidates, among which are all errors that are frequent enough, and a
second pass counts them. A run with few distinct errors needs one pass.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from goodput_core.slo.record import Outcome
from goodput_replay.runs.records import open_records, read_batches

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["NO_ERRORS", "ErrorCounts", "count_errors"]

RunError = tuple[str, int | None, str]
"""Outcome, HTTP status and detail."""

_MAX_DISTINCT: Final = 1000
_NO_ERRORS: Final[Any] = pa.array([Outcome.OK.value, Outcome.CANCELLED.value])


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCounts:
    """Errors of the judged requests of a run, or of those of its warm-up.

    Args:
        errors: distinct errors and their numbers of requests, the most frequent first; at most
            1,000, with every error of more than a thousandth of the requests that have one.
        total: number of requests with an error.
    """

    errors: tuple[tuple[RunError, int], ...]
    total: int


NO_ERRORS: Final = ErrorCounts(errors=(), total=0)


def count_errors(
    folder: Path, *, warmup: bool = False, max_distinct: int = _MAX_DISTINCT
) -> ErrorCounts:
    """Count the errors of judged requests; complete and cancelled requests have none.

    Args:
        folder: the run's folder.
        warmup: True to count those of warm-up requests instead.
        max_distinct: maximum number of distinct errors to keep.

    Raises:
        InputError: see `open_records`.

    Source: Misra and Gries, "Finding repeated elements", Science of Computer Programming, 1982.
    """
    counts: Counter[RunError] = Counter()
    total, is_exact = 0, True
    for errors in _read_errors(folder, warmup=warmup):
        counts.update(errors)
        total += len(errors)
        if len(counts) > max_distinct:
            is_exact = False
            ordered = counts.most_common(max_distinct + 1)
            least = ordered.pop()[1]
            # An error without a count is still an example, if no other one is frequent.
            counts = Counter({error: count - least for error, count in ordered})
    if not is_exact:
        found = Counter(dict.fromkeys(counts, 0))
        for errors in _read_errors(folder, warmup=warmup):
            found.update(error for error in errors if error in found)
        counts = found
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0][0], item[0][2]))
    return ErrorCounts(errors=tuple(ordered), total=total)


def _read_errors(folder: Path, *, warmup: bool) -> Iterator[list[RunError]]:
    """Yield the errors of each batch of records."""
    with open_records(folder) as opened:
        for batch in read_batches(opened, ["outcome", "status", "detail", "warmup"]):
            outcomes = pc.cast(batch["outcome"], pa.string())
            failed = pc.invert(pc.is_in(outcomes, value_set=_NO_ERRORS))
            wanted = pc.equal(batch["warmup"], warmup)
            rows = batch.filter(pc.and_(failed, wanted)).to_pydict()
            yield list(zip(rows["outcome"], rows["status"], rows["detail"], strict=True))
