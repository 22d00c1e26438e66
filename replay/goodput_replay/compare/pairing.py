"""The requests of two runs of the same trace, matched by id.

Records are written in the order in which responses end, so the two runs have nearly, but not
exactly, the same order. Both are read side by side: a request waits until the other run has its id.
If the orders differ so much that too many requests wait, as for a merged run beside one of a single
machine, only the ids of one half are matched, and the other half in another pass. The ids
themselves are compared, so hashes that collide cannot match two requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from goodput_core.slo.judging import JudgementKind, MissReason
from goodput_core.slo.pairs import PairCounts
from goodput_replay.compare.runs import LoadedRun
from goodput_replay.runs.columns import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from goodput_replay.runs.columns import RunColumns

    PartSource = Callable[[], Iterable[RunColumns]]

__all__ = ["MAX_CHANGED", "Matching", "match", "pair_requests"]

MAX_CHANGED: Final = 200
"""Changed requests that a matching lists."""
_MAX_WAITING: Final = 1 << 18
_MAX_HALVINGS: Final = 32
_REASONS: Final = tuple(MissReason)
_ATTAINED: Final = KINDS.index(JudgementKind.ATTAINED)
_MISSED: Final = KINDS.index(JudgementKind.MISSED)
_ROW: Final = np.dtype(
    [
        ("row", np.int64),
        ("scheduled_ns", np.float64),
        ("class_code", np.int32),
        ("outcome_code", np.int8),
        ("kind_code", np.int8),
        ("reason_code", np.int8),
    ]
)
"""One request of a run; the fields are those of `RunColumns`."""
_Rows = NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """The requests of two runs, matched by id.

    Args:
        baseline: the first run.
        candidate: the second run.
        only_baseline: requests that only the baseline has.
        only_candidate: requests that only the candidate has.
        not_judged: requests of both runs that were cancelled or could not be judged in one.
        counts_by_class: requests that were judged in both runs, by class of the baseline.
        gained_by_reason: requests that only the candidate served in time, by class and by first
            miss reason in the baseline, the most frequent first.
        lost_by_reason: requests that only the baseline served in time, by class and by first miss
            reason in the candidate.
        changed: requests that were gained or lost, lost ones first and each in the order of
            arrival, at most `MAX_CHANGED`.
    """

    baseline: LoadedRun
    candidate: LoadedRun
    only_baseline: int
    only_candidate: int
    not_judged: int
    counts_by_class: dict[str, PairCounts]
    gained_by_reason: dict[str, dict[MissReason, int]]
    lost_by_reason: dict[str, dict[MissReason, int]]
    changed: tuple[ChangedRequest, ...]

    @property
    def dropped(self) -> int:
        """Number of requests that were not judged in both runs, or are only in one."""
        return self.only_baseline + self.only_candidate + self.not_judged

    def counts(self, name: str) -> PairCounts:
        """Return the matched requests of a class by second of the window."""
        if name in self.counts_by_class:
            return self.counts_by_class[name]
        nothing = [0] * self.baseline.counts.length_s
        return PairCounts(gained=nothing, lost=nothing, total=nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRequest:
    """A request that met its targets in one run only.

    Args:
        lost: True if only the baseline met them.
        baseline_row: its index in the records of the baseline.
        candidate_row: its index in the records of the candidate.
    """

    lost: bool
    baseline_row: int
    candidate_row: int


def match(
    baseline: LoadedRun, candidate: LoadedRun, *, max_waiting: int = _MAX_WAITING
) -> Matching:
    """Match the requests of two runs of the same trace by id.

    Args:
        baseline: the first run.
        candidate: the second run.
        max_waiting: as in `pair_requests`.

    Raises:
        InputError: the records cannot be read.
    """
    names = baseline.class_names
    shape = (len(names), baseline.counts.length_s)
    gained, lost = _Changes(shape), _Changes(shape)
    totals = np.zeros(shape, dtype=np.int64)
    found = judged = 0
    pairs = pair_requests(baseline.parts, candidate.parts, max_waiting=max_waiting)
    for all_before, all_after in pairs:
        both = _is_judged(all_before) & _is_judged(all_after)
        before, after = all_before[both], all_after[both]
        found += len(all_before)
        judged += len(before)
        seconds = baseline.counts.second_of(before["scheduled_ns"])
        np.add.at(totals, (before["class_code"], seconds), 1)
        was_good, is_good = (rows["kind_code"] == _ATTAINED for rows in (before, after))
        for changes, mask, missed in (
            (gained, ~was_good & is_good, before),
            (lost, was_good & ~is_good, after),
        ):
            changes.add(before[mask], after[mask], seconds[mask], missed["reason_code"][mask])
    return Matching(
        baseline=baseline,
        candidate=candidate,
        only_baseline=baseline.counts.totals[0] - found,
        only_candidate=candidate.counts.totals[0] - found,
        not_judged=found - judged,
        counts_by_class={
            name: PairCounts(
                gained=gained.seconds[code].tolist(),
                lost=lost.seconds[code].tolist(),
                total=totals[code].tolist(),
            )
            for code, name in enumerate(names)
        },
        gained_by_reason={name: gained.by_reason(code) for code, name in enumerate(names)},
        lost_by_reason={name: lost.by_reason(code) for code, name in enumerate(names)},
        changed=tuple(
            ChangedRequest(lost=is_lost, baseline_row=before, candidate_row=after)
            for is_lost, changes in ((True, lost), (False, gained))
            for before, after in changes.first_rows
        )[:MAX_CHANGED],
    )


class _Changes:
    """Counts requests that changed in one direction.

    Args:
        shape: number of classes and seconds.

    Attributes:
        seconds: number of changed requests by class and second.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.seconds: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        self._arrivals: NDArray[np.float64] = np.empty((0, 3))
        self._reasons: NDArray[np.int64] = np.zeros((shape[0], len(_REASONS)), dtype=np.int64)
        self._first_with_reason = np.full(self._reasons.shape, np.iinfo(np.int64).max)

    def add(
        self,
        before: _Rows,
        after: _Rows,
        seconds: NDArray[np.int64],
        reason_codes: NDArray[np.int8],
    ) -> None:
        """Add changed requests.

        Args:
            before: the requests in the baseline.
            after: the requests in the candidate.
            seconds: second of the window of each request.
            reason_codes: first miss reason of each request, as in `RunColumns`.
        """
        np.add.at(self.seconds, (before["class_code"], seconds), 1)
        known = reason_codes >= 0
        place = before["class_code"][known], reason_codes[known]
        np.add.at(self._reasons, place, 1)
        np.minimum.at(self._first_with_reason, place, after["row"][known])
        arrivals = np.column_stack((before["scheduled_ns"], after["row"], before["row"]))
        arrivals = np.concatenate((self._arrivals, arrivals))
        # The candidate's order decides between requests of one time.
        order = np.lexsort((arrivals[:, 1], arrivals[:, 0]))[:MAX_CHANGED]
        self._arrivals = arrivals[order]

    @property
    def first_rows(self) -> list[tuple[int, int]]:
        """Indices of the first arrivals in the records of both runs, at most `MAX_CHANGED`."""
        return [(int(before), int(after)) for _, after, before in self._arrivals.tolist()]

    def by_reason(self, code: int) -> dict[MissReason, int]:
        """Return the requests of a class by miss reason, the most frequent and earliest first."""
        order = np.lexsort((self._first_with_reason[code], -self._reasons[code]))
        return {
            _REASONS[index]: int(self._reasons[code, index])
            for index in order.tolist()
            if self._reasons[code, index]
        }


def _is_judged(rows: _Rows) -> NDArray[np.bool_]:
    judged: NDArray[np.bool_] = np.isin(rows["kind_code"], (_ATTAINED, _MISSED))
    return judged


def pair_requests(
    baseline: PartSource, candidate: PartSource, *, max_waiting: int = _MAX_WAITING
) -> Iterator[tuple[_Rows, _Rows]]:
    """Yield the requests that both runs have, in batches and in any order.

    Each batch is two arrays of the same length, whose entries at one index are one request in both
    runs. An id that a run has twice is matched once.

    Args:
        baseline: returns the parts of the first run, with ids; called once for each pass.
        candidate: returns the parts of the second run.
        max_waiting: number of waiting requests above which half of the ids are left to a later
            pass.
    """
    left = [_IdShare()]
    while left:
        yield from _pair_share(left.pop(), (baseline, candidate), max_waiting, left)


@dataclass(frozen=True, slots=True, kw_only=True)
class _IdShare:
    """The ids whose hash ends with some bits, in one pass.

    Args:
        bits: number of these bits; 0 for all ids.
        value: the bits.
        done: numbers of rows at the start of both files whose pairs were found in earlier passes.
    """

    bits: int = 0
    value: int = 0
    done: tuple[int, int] = (0, 0)

    def halves(self, done: tuple[int, int]) -> tuple[_IdShare, _IdShare]:
        """Return one half, to be continued, and the other half, of which `done` rows are paired."""
        bits = self.bits + 1
        most = (max(self.done[0], done[0]), max(self.done[1], done[1]))
        other = replace(self, bits=bits, value=self.value | 1 << self.bits, done=most)
        return replace(self, bits=bits), other

    def select(self, ids: Any) -> NDArray[np.bool_]:
        """Return the mask of the ids in this share."""
        if not self.bits:
            return np.ones(len(ids), dtype=np.bool_)
        hashes = np.fromiter(map(hash, ids.to_pylist()), dtype=np.int64, count=len(ids))
        chosen: NDArray[np.bool_] = hashes & ((1 << self.bits) - 1) == self.value
        return chosen


class _RunCursor:
    """One run in one pass: its parts, and its requests that wait for the other run.

    Attributes:
        ids: ids of the waiting requests.
        rows: the waiting requests.
        rows_read: number of rows at the start of the file that were read.
        reached_ns: latest arrival of the last part.
        ended: True if all parts were read.
    """

    def __init__(self, parts: Iterator[RunColumns]) -> None:
        self._parts = parts
        self.ids: Any = pa.array([], type=pa.string())
        self.rows: _Rows = np.empty(0, dtype=_ROW)
        self.rows_read = 0
        self.reached_ns = -np.inf
        self.ended = False

    def read(self) -> tuple[Any, _Rows] | None:
        """Return the ids and the requests of the next part; None after the last one."""
        part = next(self._parts, None)
        if part is None:
            self.ended = True
            return None
        rows = np.empty(len(part.row), dtype=_ROW)
        for name in _ROW.names or ():
            rows[name] = getattr(part, name)
        if len(rows):
            self.rows_read = int(part.row[-1]) + 1
            self.reached_ns = float(part.scheduled_ns.max())
        return part.ids, rows

    def wait(self, ids: Any, rows: _Rows) -> None:
        """Let requests wait."""
        self.ids = pa.concat_arrays([self.ids, ids])
        self.rows = np.concatenate((self.rows, rows))

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Keep some of the waiting requests."""
        self.ids = self.ids.filter(pa.array(mask))
        self.rows = self.rows[mask]


def _pair_share(
    share: _IdShare, sources: tuple[PartSource, PartSource], max_waiting: int, left: list[_IdShare]
) -> Iterator[tuple[_Rows, _Rows]]:
    """Yield the pairs of one share that earlier passes did not find.

    Args:
        share: the ids to pair.
        sources: parts of both runs.
        max_waiting: number of waiting requests above which the share is halved.
        left: gets the other half.
    """
    sides = [_RunCursor(iter(source())) for source in sources]
    # A run that ended, and of which no request waits, cannot have another pair.
    while not any(side.ended and not len(side.rows) for side in sides):
        # The run that is behind the other one is read next, so that few requests wait.
        number = min((0, 1), key=lambda n: (sides[n].ended, sides[n].reached_ns))
        side, other = sides[number], sides[1 - number]
        if side.ended:
            return
        part = side.read()
        if part is None:
            other.keep(np.zeros(len(other.rows), dtype=np.bool_))
            continue
        mine = share.select(part[0])
        ids, rows = part[0].filter(pa.array(mine)), part[1][mine]
        found = pc.index_in(ids, value_set=other.ids)
        at = np.flatnonzero(found.is_valid().to_numpy(zero_copy_only=False))
        at_other, first = np.unique(found.drop_null().to_numpy(), return_index=True)
        at = at[first]
        pair = rows[at], other.rows[at_other]
        new = (pair[0]["row"] >= share.done[number]) | (pair[1]["row"] >= share.done[1 - number])
        mine_new, other_new = pair[0][new], pair[1][new]
        yield (mine_new, other_new) if number == 0 else (other_new, mine_new)
        other.keep(_all_but(len(other.rows), at_other))
        if other.ended:
            continue
        unpaired = _all_but(len(rows), at)
        side.wait(ids.filter(pa.array(unpaired)), rows[unpaired])
        if sum(len(one.rows) for one in sides) > max_waiting and share.bits < _MAX_HALVINGS:
            share, rest = share.halves((sides[0].rows_read, sides[1].rows_read))
            left.append(rest)
            for one in sides:
                one.keep(share.select(one.ids))


def _all_but(length: int, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
    mask = np.ones(length, dtype=np.bool_)
    mask[indices] = False
    return mask
