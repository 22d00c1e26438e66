"""Follow-ups of sessions, which follow the end of an earlier request instead of the trace's times.

With `--sessions causal`, a request that follows another one in the trace is a *follow-up*. It is
scheduled at the end of that request, its *predecessor*, plus a think time. All other requests
*start* at the times of the trace. A plan decides this from the trace alone, before the run.

- The predecessor is the request that `parent_request_id` names. Without a parent, it is the
  request before it in the same session, in the order of the trace. Several requests can follow one,
  but a request follows only one.
- A request whose parent is not an earlier request of the plan starts at the time of the trace, and
  so does the first request of each session in the plan.
- The think time is `delay_ms`. Without it, it is the time from the recorded end of the predecessor
  to the arrival, at least 0. If that end is unknown, it is the time between both arrivals.

Follow-ups can be due long before their times in the trace. Their requests are therefore stored in a
temporary file, and memory is about 60 bytes for each request of the plan.

If several processes or machines divide the plan, each stores and sends complete sessions. Two
sessions stay together if a request of one follows a request of the other.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from contextlib import contextmanager
from itertools import islice
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from goodput_core.errors import InputError
from goodput_core.files import is_disk_full
from goodput_core.text import printable
from goodput_core.units import NS_PER_S, ms_to_ns
from goodput_replay.plan import MAX_PLAN_NS, PlannedRequest
from goodput_replay.runs.files import DiskFullError
from goodput_replay.runs.summary_parts import SessionsSummary
from goodput_replay.shares import ALL, digest_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from fractions import Fraction

    from numpy.typing import NDArray

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.plan import RequestPlan
    from goodput_replay.shares import Share
    from goodput_traces.format.schema import TraceRow

__all__ = ["FollowUp", "FollowUps", "JudgedSpan", "open_follow_ups"]

_NONE: Final = -1
_MAX_SHOWN: Final = 80
_WRITE_BYTES: Final = 1 << 20


class FollowUp(NamedTuple):
    """A request that follows another one.

    Args:
        number: its position in the plan.
        think_ns: time from the end of its predecessor to its own scheduled time.
    """

    number: int
    think_ns: int


class FollowUps:
    """The follow-ups of a plan, of which those of one share are stored on disk.

    Args:
        plan: the plan.
        links: predecessors and think times.
        own: True for each request of the share; shape `[num_requests]`.
        file: descriptor of the file with the encoded follow-ups; read by one thread at a time.
        ends: end of each stored request in the file, by the position in the plan; shape
            `[num_requests]`.

    Attributes:
        summary: counts of the complete plan for the summary of a run.
        own_rows: number of requests in the share.
        own_warmup_rows: number of requests in the share that are not judged.
        stored_bytes: size of the file.
    """

    def __init__(
        self,
        plan: RequestPlan,
        links: _Links,
        own: NDArray[np.bool_],
        file: int,
        ends: NDArray[np.int64],
    ) -> None:
        self._plan = plan
        self._own = own
        self.stored_bytes = int(ends[-1])
        self.own_rows = int(np.count_nonzero(own))
        self.own_warmup_rows = int(np.count_nonzero(own[: plan.warmup]))
        self._file = file
        self._ends = ends
        self._is_follow_up: NDArray[np.bool_] = links.predecessors != _NONE
        follow_ups = np.flatnonzero(self._is_follow_up)
        by_predecessor = follow_ups[np.argsort(links.predecessors[follow_ups], kind="stable")]
        self._follow_ups: NDArray[np.int64] = by_predecessor
        self._think_ns = links.think_ns[by_predecessor]
        # Follow-ups of request k are at the positions from `first[k]` to `first[k + 1]`.
        self._first = np.searchsorted(
            links.predecessors[by_predecessor], np.arange(len(links.predecessors) + 1)
        )
        self._decoder = msgspec.msgpack.Decoder(PlannedRequest)
        self.summary = links.summary

    def __len__(self) -> int:
        return len(self._follow_ups)

    def starts(self) -> Iterator[PlannedRequest]:
        """Yield the requests of the share that follow no other one, in order of their arrival."""
        for planned in self._plan.requests():
            if self._own[planned.number] and not self._is_follow_up[planned.number]:
                yield planned

    def after(self, number: int) -> list[FollowUp]:
        """Return the follow-ups that follow a request, in the order of the trace."""
        span = slice(int(self._first[number]), int(self._first[number + 1]))
        return [
            FollowUp(follow_up, think_ns)
            for follow_up, think_ns in zip(
                self._follow_ups[span].tolist(), self._think_ns[span].tolist(), strict=True
            )
        ]

    def load(self, number: int) -> PlannedRequest:
        """Read a stored follow-up; its scheduled time is that of the trace.

        Raises:
            InputError: the temporary file cannot be read.
        """
        start = int(self._ends[number - 1]) if number else 0
        try:
            data = os.pread(self._file, int(self._ends[number]) - start, start)
        except OSError as error:
            raise InputError(
                f"{tempfile.gettempdir()}: the follow-ups of sessions cannot be read back "
                f"({error.strerror}); set TMPDIR to another folder"
            ) from error
        return self._decoder.decode(data)


@contextmanager
def open_follow_ups(
    plan: RequestPlan, share: Share = ALL, *, stored: bool = True
) -> Iterator[FollowUps]:
    """Find the follow-ups of a plan, and store them in a temporary file during the `with` block.

    Args:
        plan: the complete plan.
        share: the requests that this process sends.
        stored: False if this process sends no request.

    Raises:
        InputError: no request follows another one, the file cannot be written, or see
            `RequestPlan.requests`.
        DiskFullError: the temporary file does not fit on its disk.
    """
    with tempfile.TemporaryFile(prefix="goodput-", buffering=0) as file:
        table, store = _LinkTable(plan.transforms.speed), _Store(file)
        for row, planned in plan.rows():
            may_follow = table.add(row, planned)
            store.add(planned if stored and may_follow and share.holds(planned) else None)
        found = table.resolve()
        if not found.summary.follow_ups:
            raise InputError(
                f"{plan.trace.path}: no request follows another one: "
                f"{_describe_orphans(plan, found)}, or remove --sessions causal"
            )
        if found.longest_wait_ns() > MAX_PLAN_NS:
            raise InputError(
                f"{plan.trace.path}: the think times of requests that follow each other add up to "
                "more than a year; correct delay_ms, or remove --sessions causal"
            )
        own = found.owned(share)
        needed = own & (found.predecessors != _NONE)
        if stored and np.any(needed & ~store.has()):
            # Sessions stay together with sessions of another share, which is known only now.
            store.clear()
            for planned in plan.requests():
                store.add(planned if needed[planned.number] else None)
        store.flush()
        yield FollowUps(plan, found, own, file.fileno(), store.ends())


def _describe_orphans(plan: RequestPlan, links: _Links) -> str:
    """Return why no request of a plan follows another one, and the remedy.

    Raises:
        InputError: see `RequestPlan.requests`.
    """
    if links.first_orphan == _NONE:
        return "no session has two requests in the selected part; select a longer part of the trace"
    rows = islice((row for row, _ in plan.rows()), links.first_orphan, None)
    orphan = next(rows)
    name, parent = orphan.request_id, orphan.parent_request_id or ""
    problem, remedy = f"has the parent_request_id {parent[:_MAX_SHOWN]!r}, ", "correct the trace"
    if parent == name:
        problem = "has its own id as its parent_request_id"
    elif any(row.request_id == parent for row in rows):
        problem += "which is the id of a later request"
    else:
        problem += "which no request of the selected part has"
        remedy = "select a longer part of the trace, correct it"
    count = links.summary.without_parent
    total = f" (the first of {count} such requests)" if count > 1 else ""
    return f"{printable(name[:_MAX_SHOWN])}{total} {problem}; {remedy}"


class _Store:
    """Writes requests into a file.

    Args:
        file: an empty file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._encode = msgspec.msgpack.Encoder().encode
        self._buffer = bytearray()
        self._size = 0
        self._ends = array("q")

    def add(self, planned: PlannedRequest | None) -> None:
        """Write the next request of the plan; None if it is not needed."""
        if planned is not None:
            self._buffer += self._encode(planned)
        self._ends.append(self._size + len(self._buffer))
        if len(self._buffer) >= _WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffer."""
        self._size += _write(self._file, self._buffer)

    def clear(self) -> None:
        """Remove everything."""
        self._file.seek(0)
        self._file.truncate()
        self._buffer.clear()
        self._size = 0
        self._ends = array("q")

    def ends(self) -> NDArray[np.int64]:
        """Return the end of each request in the file; shape `[num_requests]`."""
        return np.array(self._ends, dtype=np.int64)

    def has(self) -> NDArray[np.bool_]:
        """Return True for each written request; shape `[num_requests]`."""
        written: NDArray[np.bool_] = np.diff(self.ends(), prepend=0) > 0
        return written


def _write(file: IO[bytes], buffer: bytearray) -> int:
    """Write and clear the buffer; return the number of bytes."""
    size = len(buffer)
    try:
        left = memoryview(bytes(buffer))
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        folder = tempfile.gettempdir()
        if is_disk_full(error):
            raise DiskFullError(
                f"{folder}: the disk is full, and the follow-ups of sessions need more space; free "
                "some space, or set TMPDIR to another folder"
            ) from error
        why = error.strerror or type(error).__name__
        raise InputError(
            f"{folder}: the follow-ups of sessions cannot be stored ({why}); set TMPDIR to another "
            "folder"
        ) from error
    buffer.clear()
    return size


class _Links(NamedTuple):
    """Predecessors of the requests of a plan.

    Args:
        predecessors: position of each request's predecessor, -1 for a start; shape
            `[num_requests]`.
        think_ns: think time of each follow-up, 0 for a start; shape `[num_requests]`.
        digests: digest of the first request among the sessions that stay together with that of
            each request; shape `[num_requests]`.
        first_orphan: position of the first request whose parent is not an earlier request of the
            plan; -1 if there is none.
        summary: counts.
    """

    predecessors: NDArray[np.int64]
    think_ns: NDArray[np.int64]
    digests: NDArray[np.uint64]
    first_orphan: int
    summary: SessionsSummary

    def longest_wait_ns(self) -> float:
        """Return the longest sum of think times of requests that follow each other.

        If all think times together are at most `MAX_PLAN_NS`, it is their sum.
        """
        total_ns = float(self.think_ns.sum(dtype=np.float64))
        if total_ns <= MAX_PLAN_NS:
            return total_ns
        waits_ns: list[int] = []
        for predecessor, think_ns in zip(
            self.predecessors.tolist(), self.think_ns.tolist(), strict=True
        ):
            waits_ns.append(think_ns + (0 if predecessor == _NONE else waits_ns[predecessor]))
        return max(waits_ns)

    def owned(self, share: Share) -> NDArray[np.bool_]:
        """Return True for each request of a share; shape `[num_requests]`."""
        owned: NDArray[np.bool_] = self.digests % share.count == share.index
        return owned


class _LinkTable:
    """Collects what decides about predecessors, think times and shares, 56 bytes per request.

    Ids are represented by 64-bit hashes.

    Args:
        speed: factor for the speed of time, by which think times and durations are divided.
    """

    def __init__(self, speed: Fraction) -> None:
        self._speed = speed
        self._sessions_seen: set[int] = set()
        self._ids = array("q")
        self._sessions = array("q")
        self._parents = array("q")
        self._arrivals_ns = array("q")
        self._durations_ns = array("q")
        self._delays_ns = array("q")
        self._digests = array("Q")

    def add(self, row: TraceRow, planned: PlannedRequest) -> bool:
        """Add the next request; True if it can turn out to be a follow-up."""
        session = _hash(row.session_id)
        parent = _hash(row.parent_request_id)
        self._ids.append(_hash(row.request_id))
        self._sessions.append(session)
        self._parents.append(parent)
        self._arrivals_ns.append(planned.scheduled_ns)
        self._durations_ns.append(self._scaled(row.duration_e2e_ms))
        self._delays_ns.append(self._scaled(row.delay_ms))
        self._digests.append(digest_of(planned))
        follows = parent != _NONE or session in self._sessions_seen
        if session != _NONE:
            self._sessions_seen.add(session)
        return follows

    def resolve(self) -> _Links:
        """Return the predecessors and think times of all requests."""
        ids, sessions, parents, arrivals_ns, durations_ns, delays_ns = (
            np.frombuffer(values, dtype=np.int64)
            for values in (
                self._ids,
                self._sessions,
                self._parents,
                self._arrivals_ns,
                self._durations_ns,
                self._delays_ns,
            )
        )
        has_parent = parents != _NONE
        predecessors = np.where(
            has_parent, _earlier_of_id(parents, ids), _previous_of_session(sessions)
        )
        is_follow_up = predecessors != _NONE
        gaps_ns = arrivals_ns - arrivals_ns[predecessors]
        known_ns = durations_ns[predecessors]
        has_delay, has_duration = delays_ns != _NONE, known_ns != _NONE
        pause_ns = np.where(has_duration, gaps_ns - known_ns, gaps_ns)
        think_ns = np.where(has_delay, delays_ns, np.maximum(pause_ns, 0))
        think_ns[~is_follow_up] = 0
        derived = is_follow_up & ~has_delay
        orphans = np.flatnonzero(has_parent & ~is_follow_up)

        def count(mask: NDArray[np.bool_]) -> int:
            return int(np.count_nonzero(mask))

        return _Links(
            predecessors=predecessors,
            think_ns=think_ns,
            digests=np.frombuffer(self._digests, dtype=np.uint64)[
                _first_of_group(sessions, predecessors)
            ],
            first_orphan=int(orphans[0]) if len(orphans) else _NONE,
            summary=SessionsSummary(
                starts=count(~is_follow_up),
                follow_ups=count(is_follow_up),
                think_recorded=count(is_follow_up & has_delay),
                think_from_ends=count(derived & has_duration),
                think_from_arrivals=count(derived & ~has_duration),
                overlapping=count(derived & (pause_ns < 0)),
                without_parent=len(orphans),
            ),
        )

    def _scaled(self, ms: float | None) -> int:
        """Return a duration at the speed of the run; -1 if it is unknown."""
        if ms is None:
            return _NONE
        return ms_to_ns(ms) * self._speed.denominator // self._speed.numerator


def _hash(name: str | None) -> int:
    """Return a hash of 64 bits; -1, which Python's hash never is, for no name."""
    return _NONE if name is None else hash(name)


def _earlier_of_id(wanted: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each wanted id if it is an earlier one, else -1."""
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)
    found = order[at]
    is_earlier = (ids[found] == wanted) & (found < np.arange(len(ids)))
    return np.where(is_earlier, found, _NONE)


def _previous_of_session(sessions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of the previous request of each request's session, or -1."""
    previous = np.full(len(sessions), _NONE, dtype=np.int64)
    order = np.argsort(sessions, kind="stable")
    same = (sessions[order[1:]] == sessions[order[:-1]]) & (sessions[order[1:]] != _NONE)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _first_of_group(
    sessions: NDArray[np.int64], predecessors: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the position of the first request of each request's group.

    A group has complete sessions, and with each request its predecessor.
    """
    first = np.arange(len(sessions))
    has_session = sessions != _NONE
    _, start, session = np.unique(sessions[has_session], return_index=True, return_inverse=True)
    first[has_session] = np.flatnonzero(has_session)[start][session]
    follow_ups = np.flatnonzero(predecessors != _NONE)
    pairs = np.stack((first[follow_ups], first[predecessors[follow_ups]]), axis=1)
    # Groups of sessions, each represented by the first request of its first session.
    joined: dict[int, int] = {}

    def find(position: int) -> int:
        while (before := joined.get(position, position)) != position:
            joined[position] = joined.get(before, before)
            position = joined[position]
        return position

    for one, other in np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0).tolist():
        earlier, later = sorted((find(one), find(other)))
        joined[later] = earlier
    group = np.arange(len(sessions))
    for position in joined:
        group[position] = find(position)
    return group[first]


class JudgedSpan:
    """The window of a run whose scheduled times are not known in advance.

    It starts at the run's time zero, or with warm-up requests at the first judged request, and ends
    after the last judged request, a second later at least.

    Args:
        starts_at_zero: True if the plan has no warm-up requests.
    """

    def __init__(self, *, starts_at_zero: bool) -> None:
        self._first_ns: int | None = 0 if starts_at_zero else None
        self._last_ns = 0

    def add(self, record: RequestRecord) -> None:
        """Add a judged request."""
        at_ns = record.scheduled_ns
        self._first_ns = at_ns if self._first_ns is None else min(self._first_ns, at_ns)
        self._last_ns = max(self._last_ns, at_ns)

    @property
    def span_ns(self) -> tuple[int, int]:
        """Start and end of the window, nanoseconds since the run's time zero."""
        first_ns = self._first_ns or 0
        return first_ns, max(first_ns + NS_PER_S, self._last_ns + 1)
