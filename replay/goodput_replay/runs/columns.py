"""Numeric columns of a run as arrays, for the summary and the report.

The columns are read in parts, so that memory does not grow with the run. What one pass cannot
compute reads the parts several times. Gaps are counted in a streaming pass. Judgements
are read from the records and not recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from goodput_core.slo.judging import JudgementKind, MissReason
from goodput_core.slo.record import Outcome
from goodput_replay.runs.records import open_records, read_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from fractions import Fraction
    from pathlib import Path

__all__ = [
    "KINDS",
    "OUTCOMES",
    "ColumnParts",
    "GapCounts",
    "PartReader",
    "PromptTokenCounts",
    "RunColumns",
    "count_gaps",
    "count_prompt_tokens",
    "count_retried",
    "read_parts",
]

OUTCOMES: Final = tuple(Outcome)
KINDS: Final = tuple(JudgementKind)
_REASONS: Final = tuple(MissReason)
_PART_ROWS: Final = 1 << 16
_KEPT_PARTS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunColumns:
    """The judged requests of a run, one entry each; every array has the shape [num_requests].

    Times are nanoseconds since the run's time zero. They are floats, exact up to 104 days, and NaN
    for missing values. `row` is the index in the file, including warm-up rows. `ids` is an Arrow
    array of the request ids, or None if they were not read.
    """

    class_names: tuple[str, ...]
    class_code: NDArray[np.int64]
    outcome_code: NDArray[np.int64]
    kind_code: NDArray[np.int64]
    reason_code: NDArray[np.int64]
    scheduled_ns: NDArray[np.float64]
    sent_ns: NDArray[np.float64]
    first_token_ns: NDArray[np.float64]
    last_token_ns: NDArray[np.float64]
    end_ns: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    tbt_p99_us: NDArray[np.float64]
    row: NDArray[np.int64]
    ids: Any = None

    @property
    def ttft_ns(self) -> NDArray[np.float64]:
        """Time from the scheduled arrival to the first token."""
        return self.first_token_ns - self.scheduled_ns

    @property
    def ttft_from_send_ns(self) -> NDArray[np.float64]:
        """Time from the actual send to the first token."""
        return self.first_token_ns - self.sent_ns

    @property
    def tpot_ns(self) -> NDArray[np.float64]:
        """Mean time per token after the first; NaN for fewer than two tokens."""
        steps = np.where(self.output_tokens > 1, self.output_tokens - 1, 1)
        mean_ns = (self.last_token_ns - self.first_token_ns) / steps
        return np.where(self.output_tokens > 1, mean_ns, np.nan)

    @property
    def e2e_ns(self) -> NDArray[np.float64]:
        """Time from the scheduled arrival to the end; NaN for incomplete responses."""
        return np.where(self.of_outcome(Outcome.OK), self.end_ns - self.scheduled_ns, np.nan)

    @property
    def lag_ns(self) -> NDArray[np.float64]:
        """Send lag; NaN if the request was not sent."""
        return self.sent_ns - self.scheduled_ns

    def of_class(self, name: str) -> NDArray[np.bool_]:
        """Mask of the requests of a class."""
        if name not in self.class_names:
            return np.zeros(len(self.row), dtype=np.bool_)
        return _equals(self.class_code, self.class_names.index(name))

    def of_outcome(self, outcome: Outcome) -> NDArray[np.bool_]:
        """Mask of the requests with this outcome."""
        return _equals(self.outcome_code, OUTCOMES.index(outcome))

    def of_first_reason(self, reason: MissReason) -> NDArray[np.bool_]:
        """Mask of the requests whose first miss reason is `reason`."""
        return _equals(self.reason_code, _REASONS.index(reason))

    def first_reasons(self, indices: NDArray[np.int64]) -> list[MissReason]:
        """Return the first miss reasons of some requests, without those that did not miss."""
        return [_REASONS[code] for code in self.reason_code[indices].tolist() if code >= 0]

    def outcome(self, index: int) -> Outcome:
        """Return the outcome of one request."""
        return OUTCOMES[int(self.outcome_code[index])]

    def of_kind(self, kind: JudgementKind) -> NDArray[np.bool_]:
        """Mask of the requests with this judgement."""
        return _equals(self.kind_code, KINDS.index(kind))


class ColumnParts:
    """The judged requests of a run in parts, read again each time it is iterated.

    A run that fits into two parts is kept in memory after the first time. The class names of a part
    are those of all parts until then, so that the code of a class is the same in all parts.

    Args:
        folder: the run's folder.
        part_rows: maximum number of rows of a part.
        ids: True to read the request ids.

    Raises:
        InputError: see `open_records`; raised during the iteration.
    """

    def __init__(self, folder: Path, *, part_rows: int = _PART_ROWS, ids: bool = False) -> None:
        self._folder = folder
        self._part_rows = part_rows
        self._columns = [*_COLUMNS, "request_id"] if ids else list(_COLUMNS)
        self._kept: list[RunColumns] = []

    def __iter__(self) -> Iterator[RunColumns]:
        if self._kept:
            yield from self._kept
            return
        names: list[str] = []
        kept: list[RunColumns] = []
        first = 0
        with open_records(self._folder) as opened:
            num_rows = opened.metadata.num_rows
            for groups in _cut_groups(opened.metadata, self._part_rows):
                table = opened.read_row_groups(groups, columns=self._columns, use_threads=False)
                part = _make_part(table, names, first)
                first += table.num_rows
                if num_rows <= _KEPT_PARTS * self._part_rows:
                    kept.append(part)
                yield part
        self._kept = kept


class PartReader(Protocol):
    """Computes something from the parts of a run, in one pass over them or in several.

    Attributes:
        finished: True if no further pass is needed.
    """

    @property
    def finished(self) -> bool: ...  # noqa: D102

    def add(self, part: RunColumns) -> None:
        """Add the next part; each pass has the same parts in the same order."""
        ...

    def end_pass(self) -> None:
        """End a pass over all parts."""
        ...


def read_parts(parts: Iterable[RunColumns], readers: Iterable[PartReader]) -> None:
    """Pass over the parts until all readers have finished."""
    while unfinished := [reader for reader in readers if not reader.finished]:
        for part in parts:
            for reader in unfinished:
                reader.add(part)
        for reader in unfinished:
            reader.end_pass()


def count_gaps(folder: Path) -> dict[str, GapCounts]:
    """Count the gaps between tokens of each class in a streaming pass, without warm-up rows."""
    counts: dict[str, GapCounts] = {}
    with open_records(folder) as opened:
        columns = ["slo_class", "warmup", "gaps_us"]
        for batch in read_batches(opened, columns):
            _count_batch(batch, counts)
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokenCounts:
    """Prompt tokens of the judged requests whose responses report them.

    Args:
        requests: number of these requests.
        planned: their prompt tokens, as in the records.
        reported: their prompt tokens, as the server counted them.
        max_difference: largest difference of one request, either way.
    """

    requests: int
    planned: int
    reported: int
    max_difference: int


def count_prompt_tokens(folder: Path) -> PromptTokenCounts:
    """Compare the prompt tokens of judged requests with those that the server counted."""
    requests = planned = reported = largest = 0
    with open_records(folder) as opened:
        names = ["input_tokens", "reported_input_tokens", "warmup"]
        if names[1] not in opened.schema_arrow.names:
            return PromptTokenCounts(requests=0, planned=0, reported=0, max_difference=0)
        for batch in read_batches(opened, names):
            found = pc.and_(pc.is_valid(batch[names[1]]), pc.invert(batch["warmup"]))
            rows = batch.filter(found)
            counts, claims = (rows[name].to_numpy() for name in names[:2])
            if len(counts):
                requests += len(counts)
                planned += int(counts.sum())
                reported += int(claims.sum())
                largest = max(largest, int(np.abs(claims - counts).max()))
    return PromptTokenCounts(
        requests=requests, planned=planned, reported=reported, max_difference=largest
    )


def count_retried(folder: Path) -> int:
    """Count the judged requests that were sent more than once."""
    count = 0
    with open_records(folder) as opened:
        if "retries" not in opened.schema_arrow.names:
            return 0  # written by an earlier version
        for batch in read_batches(opened, ["retries", "warmup"]):
            retried = pc.and_(pc.greater(batch["retries"], 0), pc.invert(batch["warmup"]))
            count += retried.true_count
    return count


_COLUMNS: Final = (
    "slo_class",
    "outcome",
    "judgement",
    "miss_reasons",
    "scheduled_ns",
    "sent_ns",
    "first_token_ns",
    "last_token_ns",
    "end_ns",
    "input_tokens",
    "output_tokens",
    "tbt_p99_us",
    "warmup",
)


def _cut_groups(metadata: Any, rows: int) -> Iterator[list[int]]:
    """Yield lists of row groups with at most `rows` rows each, or of one row group."""
    groups: list[int] = []
    size = 0
    for group in range(metadata.num_row_groups):
        added = metadata.row_group(group).num_rows
        if groups and size + added > rows:
            yield groups
            groups, size = [], 0
        groups.append(group)
        size += added
    yield groups


def _make_part(table: Any, names: list[str], first: int) -> RunColumns:
    """Return the judged requests of a table.

    Args:
        table: rows of the file with `_COLUMNS`.
        names: known names of classes; new ones are appended.
        first: index of the first row in the file.
    """
    is_judged = pc.invert(table["warmup"])
    judged = table.filter(is_judged)
    classes = judged["slo_class"]
    names += (name for name in pc.unique(classes).to_pylist() if name not in names)
    return RunColumns(
        class_names=tuple(names),
        class_code=_encode(classes, names),
        outcome_code=_encode(judged["outcome"], [o.value for o in OUTCOMES]),
        kind_code=_encode(judged["judgement"], [k.value for k in KINDS]),
        reason_code=_encode_first_reasons(judged["miss_reasons"]),
        scheduled_ns=_to_floats(judged["scheduled_ns"]),
        sent_ns=_to_floats(judged["sent_ns"]),
        first_token_ns=_to_floats(judged["first_token_ns"]),
        last_token_ns=_to_floats(judged["last_token_ns"]),
        end_ns=_to_floats(judged["end_ns"]),
        input_tokens=judged["input_tokens"].to_numpy(),
        output_tokens=judged["output_tokens"].to_numpy(),
        tbt_p99_us=_to_floats(judged["tbt_p99_us"]),
        row=first + np.flatnonzero(is_judged.to_numpy()),
        ids=judged["request_id"].combine_chunks() if "request_id" in judged.schema.names else None,
    )


def _count_batch(batch: Any, counts: dict[str, GapCounts]) -> None:
    judged = batch.filter(pc.invert(batch["warmup"]))
    gaps = judged["gaps_us"]
    lengths = pc.list_value_length(gaps).to_numpy()
    values = gaps.flatten().to_numpy()
    names = _to_strings(judged["slo_class"]).to_pylist()
    owners = np.repeat(np.arange(len(names)), lengths)
    for name in set(names):
        mask = np.array([row_name == name for row_name in names], dtype=np.bool_)
        counts.setdefault(name, GapCounts()).add(values[mask[owners]])


def _equals(codes: NDArray[np.int64], code: int) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = codes == code
    return mask


def _to_strings(column: Any) -> Any:
    """Return a dictionary-encoded column as plain strings."""
    return pc.cast(column, pa.string())


def _encode(column: Any, names: Sequence[str]) -> NDArray[np.int64]:
    """Return the index in `names` of each text of a column without nulls; −1 for other texts."""
    texts, indices = column, None
    if pa.types.is_dictionary(column.type):  # many rows have few texts
        labels = column.combine_chunks()
        texts, indices = labels.dictionary, labels.indices.to_numpy()
    found = pc.index_in(texts, value_set=pa.array(names, type=pa.string()))
    codes: NDArray[np.int64] = pc.fill_null(found, -1).to_numpy().astype(np.int64)
    return codes if indices is None else codes[indices]


def _encode_first_reasons(column: Any) -> NDArray[np.int64]:
    """Return the index in `MissReason` of each list's first reason; −1 for an empty list."""
    lists = column.combine_chunks()
    firsts = np.full(len(lists), -1, dtype=np.int64)
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    offsets = np.concatenate(([0], np.cumsum(lengths)))[:-1].astype(np.int64)
    codes = _encode(pc.list_flatten(lists), [r.value for r in _REASONS])
    firsts[lengths > 0] = codes[offsets[lengths > 0]]
    return firsts


def _to_floats(column: Any) -> NDArray[np.float64]:
    values: NDArray[np.float64] = pc.cast(column, pa.float64(), safe=False).to_numpy(
        zero_copy_only=False
    )
    return values


# Each value below 2^11 has its own bucket. Larger values of the same bit length share a bucket if
# their 11 leading bits are equal.
_BITS: Final = 11
_LINEAR: Final = 1 << _BITS
_HALF: Final = _LINEAR // 2
_BUCKETS: Final = _LINEAR + (31 - _BITS) * _HALF


class GapCounts:
    """Counts of gaps, added as arrays, to 0.1 %; memory is constant, about 100 kB.

    The histograms of `goodput_core.histogram` use the standard library and add one value at a
    time, which is too slow for the millions of gaps of a run.
    """

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(_BUCKETS, dtype=np.int64)
        self._largest_us = 0

    @classmethod
    def merged(cls, parts: Iterable[GapCounts]) -> GapCounts:
        """Return the sum of all parts."""
        total = cls()
        for part in parts:
            total._counts += part.counts
            total._largest_us = max(total._largest_us, part.largest_us)
        return total

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of gaps in each bucket."""
        return self._counts

    @property
    def total(self) -> int:
        """Number of gaps."""
        return int(self._counts.sum())

    @property
    def largest_us(self) -> int:
        """The exact maximum gap; 0 if there are none."""
        return self._largest_us

    def add(self, gaps_us: NDArray[np.int32]) -> None:
        """Count gaps of 0 … 2³¹−1 µs; a negative gap counts as 0."""
        if not len(gaps_us):
            return
        values = np.maximum(gaps_us, 0).astype(np.int64)
        self._largest_us = max(self._largest_us, int(values.max()))
        self._counts += np.bincount(_find_bucket(values), minlength=_BUCKETS)

    def quantile_us(self, q: Fraction) -> int:
        """Return the nearest-rank quantile, at most 0.1 % above the measured gap.

        Raises:
            ValueError: no gap was counted.
        """
        total = self.total
        if not total:
            raise ValueError("a quantile needs at least one gap")
        rank = max(1, -(-q.numerator * total // q.denominator))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(int(_upper_edge_us(np.array([bucket]))[0]), self._largest_us)

    def cumulative(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the upper edge of each filled bucket in µs, and the share of gaps up to it."""
        filled = np.flatnonzero(self._counts)
        edges = np.minimum(_upper_edge_us(filled), self._largest_us)
        return edges, np.cumsum(self._counts[filled]) / max(1, self.total)


def _find_bucket(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bucket of each value in 0 … 2³¹−1."""
    _, exponents = np.frexp(values.astype(np.float64))
    shifts = np.maximum(exponents.astype(np.int64) - _BITS, 0)
    above: NDArray[np.int64] = _LINEAR + (shifts - 1) * _HALF + (values >> shifts) - _HALF
    return np.where(shifts == 0, values, above)


def _upper_edge_us(buckets: NDArray[Any]) -> NDArray[np.int64]:
    """Return the largest value of each bucket."""
    shifts = np.maximum((buckets - _LINEAR) // _HALF + 1, 0)
    mantissas = np.where(buckets < _LINEAR, buckets, (buckets - _LINEAR) % _HALF + _HALF)
    upper: NDArray[np.int64] = ((mantissas + 1).astype(np.int64) << shifts) - 1
    return upper
