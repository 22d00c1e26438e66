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

Follow-ups can be due long before their times in the trace, so they are stored in a temporary SQLite
database. It also has the tables in which predecessors are found. Its memory does not grow with the
trace.

If several processes or machines divide the plan, each stores and sends complete sessions. Two
sessions stay together if a request of one follows a request of the other.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager
from dataclasses import fields
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from goodput_core.errors import InputError
from goodput_core.text import printable
from goodput_core.units import NS_PER_S, ms_to_ns
from goodput_replay.plan import MAX_PLAN_NS, PlannedRequest
from goodput_replay.runs.files import DiskFullError
from goodput_replay.runs.summary_parts import SessionsSummary
from goodput_replay.shares import ALL, digest_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from fractions import Fraction

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.plan import RequestPlan
    from goodput_replay.shares import Share
    from goodput_traces.format.schema import TraceRow

__all__ = ["FollowUp", "FollowUps", "JudgedSpan", "open_follow_ups"]

_MAX_SHOWN: Final = 80

# A request is named by its position in the plan, and an id by a hash of 64 bits. A group has
# complete sessions, and with each request its predecessor. It is named by its first request.
_TABLES: Final = """
    PRAGMA journal_mode = OFF;
    PRAGMA temp_store = FILE;
    PRAGMA cache_size = -16384;
    CREATE TABLE requests (
        number INTEGER PRIMARY KEY, arrival_ns INTEGER, duration_ns INTEGER, wait_ns INTEGER,
        session_group INTEGER
    );
    CREATE TABLE ids (id INTEGER PRIMARY KEY, number INTEGER);
    CREATE TABLE sessions (session INTEGER PRIMARY KEY, last INTEGER);
    CREATE TABLE groups (name INTEGER PRIMARY KEY, joined INTEGER, is_own INTEGER);
    CREATE TABLE follow_ups (number INTEGER PRIMARY KEY, predecessor INTEGER, think_ns INTEGER);
    CREATE TABLE stored (number INTEGER PRIMARY KEY, request BLOB);
    -- A cross join reads the first table in the outer loop, in the order of the numbers.
    CREATE VIEW own AS
        SELECT number FROM requests CROSS JOIN groups ON groups.name = requests.session_group
        WHERE is_own;
"""
_OWN_STARTS: Final = """
    SELECT number FROM own WHERE number NOT IN (SELECT number FROM follow_ups) ORDER BY number
"""
_OWN_FOLLOW_UPS: Final = """
    SELECT number FROM own WHERE number IN (SELECT number FROM follow_ups) ORDER BY number
"""


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
        database: the tables, complete; SQLite lets only one thread read at a time.
        summary: counts of the complete plan for the summary of a run.

    Attributes:
        summary: see above.
        own_rows: number of requests in the share.
        own_warmup_rows: number of requests in the share that are not judged.
        stored_bytes: size of the stored requests.
    """

    def __init__(
        self, plan: RequestPlan, database: sqlite3.Connection, summary: SessionsSummary
    ) -> None:
        self._plan = plan
        self._database = database
        self._decoder = msgspec.msgpack.Decoder(PlannedRequest)
        self.summary = summary
        self.own_rows, self.own_warmup_rows = database.execute(
            "SELECT count(*), coalesce(sum(number < ?), 0) FROM own", (plan.warmup,)
        ).fetchone()
        (self.stored_bytes,) = database.execute(
            "SELECT coalesce(sum(length(request)), 0) FROM stored"
        ).fetchone()

    def __len__(self) -> int:
        return self.summary.follow_ups

    def starts(self) -> Iterator[PlannedRequest]:
        """Yield the requests of the share that follow no other one, in order of their arrival."""
        with _reported():
            yield from _selected(self._plan, self._database.execute(_OWN_STARTS))

    def after(self, number: int) -> list[FollowUp]:
        """Return the follow-ups that follow a request, in the order of the trace."""
        with _reported():
            found = self._database.execute(
                "SELECT number, think_ns FROM follow_ups WHERE predecessor = ? ORDER BY number",
                (number,),
            )
            return [FollowUp(*row) for row in found]

    def load(self, number: int) -> PlannedRequest:
        """Read a stored follow-up; its scheduled time is that of the trace.

        Raises:
            InputError: the temporary file cannot be read.
        """
        with _reported():
            (data,) = self._database.execute(
                "SELECT request FROM stored WHERE number = ?", (number,)
            ).fetchone()
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
    # SQLite removes a database without a name when it is closed, also after a crash.
    with closing(sqlite3.connect("", isolation_level=None, check_same_thread=False)) as database:
        with _reported():
            database.executescript(_TABLES)
            follow_ups = FollowUps(plan, database, _find(plan, share, database, stored=stored))
        yield follow_ups


def _find(
    plan: RequestPlan, share: Share, database: sqlite3.Connection, *, stored: bool
) -> SessionsSummary:
    """Fill the tables, and return the counts.

    Raises:
        InputError: no request follows another one, or the think times are too long.
    """
    encode = msgspec.msgpack.Encoder().encode
    store = "INSERT INTO stored VALUES (?, ?)"
    database.execute("BEGIN")
    links = _Links(database, plan.transforms.speed, share)
    for row, planned in plan.rows():
        if links.add(row, planned) and stored and share == ALL:
            database.execute(store, (planned.number, encode(planned)))
    if not links.counts["follow_ups"]:
        raise InputError(
            f"{plan.trace.path}: no request follows another one: "
            f"{_describe_orphans(plan, links)}, or remove --sessions causal"
        )
    if links.longest_wait_ns > MAX_PLAN_NS:
        raise InputError(
            f"{plan.trace.path}: the think times of requests that follow each other add up to "
            "more than a year; correct delay_ms, or remove --sessions causal"
        )
    links.resolve_joined()
    if stored and share != ALL:
        # Only now it is known which sessions stay together with sessions of this share.
        for planned in _selected(plan, database.execute(_OWN_FOLLOW_UPS)):
            database.execute(store, (planned.number, encode(planned)))
    database.execute("CREATE INDEX by_predecessor ON follow_ups (predecessor)")
    database.execute("COMMIT")
    return SessionsSummary(**links.counts)


def _selected(plan: RequestPlan, numbers: Iterator[tuple[int]]) -> Iterator[PlannedRequest]:
    """Yield the requests of a plan that have these numbers, which increase."""
    wanted = next(numbers, None)
    for planned in plan.requests():
        if wanted is None:
            return
        if planned.number == wanted[0]:
            yield planned
            wanted = next(numbers, None)


def _describe_orphans(plan: RequestPlan, links: _Links) -> str:
    """Return why no request of a plan follows another one, and the remedy.

    Raises:
        InputError: see `RequestPlan.requests`.
    """
    if links.first_orphan is None:
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
    count = links.counts["without_parent"]
    total = f" (the first of {count} such requests)" if count > 1 else ""
    return f"{printable(name[:_MAX_SHOWN])}{total} {problem}; {remedy}"


@contextmanager
def _reported() -> Iterator[None]:
    """Turn errors of SQLite into a sentence.

    Raises:
        InputError: the temporary file cannot be written or read.
        DiskFullError: its disk is full.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            raise DiskFullError(
                "the disk with the temporary files is full, and the follow-ups of sessions need "
                "more space; free some space, or set TMPDIR to a folder on another disk"
            ) from error
        raise InputError(
            f"the follow-ups of sessions cannot be kept in a temporary file ({error}); set TMPDIR "
            "to another folder"
        ) from error


class _Links:
    """Finds the predecessor, the think time and the group of each request, in the order of a plan.

    Args:
        database: the tables, which are empty.
        speed: factor for the speed of time, by which think times and durations are divided.
        share: the requests of this process.

    Attributes:
        counts: the fields of `SessionsSummary`.
        first_orphan: position of the first request whose parent is not an earlier request of the
            plan; None if there is none.
        longest_wait_ns: the longest sum of think times of requests that follow each other, or
            another value above `MAX_PLAN_NS`.
    """

    def __init__(self, database: sqlite3.Connection, speed: Fraction, share: Share) -> None:
        self._execute = database.execute
        self._speed = speed
        self._share = share
        self.counts = dict.fromkeys((field.name for field in fields(SessionsSummary)), 0)
        self.first_orphan: int | None = None
        self.longest_wait_ns = 0

    def add(self, row: TraceRow, planned: PlannedRequest) -> bool:
        """Add the next request; True if it is a follow-up."""
        number, counts = planned.number, self.counts
        session, parent = row.session_id, row.parent_request_id
        last = None
        if session is not None:
            last = self._one("SELECT last FROM sessions WHERE session = ?", hash(session))
        predecessor = last
        if parent is not None:
            predecessor = self._one("SELECT number FROM ids WHERE id = ?", hash(parent))
            if predecessor is None:
                counts["without_parent"] += 1
                if self.first_orphan is None:
                    self.first_orphan = number
        wait_ns = 0
        if predecessor is None:
            counts["starts"] += 1
        else:
            counts["follow_ups"] += 1
            think_ns, wait_ns = self._think(predecessor, row, planned.scheduled_ns)
            self.longest_wait_ns = max(self.longest_wait_ns, wait_ns)
            self._execute(
                "INSERT INTO follow_ups VALUES (?, ?, ?)", (number, predecessor, think_ns)
            )
        self._execute(
            "INSERT INTO requests VALUES (?, ?, ?, ?, ?)",
            (
                number,
                planned.scheduled_ns,
                self._scaled(row.duration_e2e_ms),
                wait_ns,
                self._group(planned, last, predecessor),
            ),
        )
        self._execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (hash(row.request_id), number))
        if session is not None:
            self._execute("INSERT OR REPLACE INTO sessions VALUES (?, ?)", (hash(session), number))
        return predecessor is not None

    def resolve_joined(self) -> None:
        """Let groups that were joined with an earlier one belong to the share of that one."""
        for (name,) in self._execute("SELECT name FROM groups WHERE joined IS NOT NULL").fetchall():
            self._execute(
                "UPDATE groups SET is_own = (SELECT is_own FROM groups WHERE name = ?) "
                "WHERE name = ?",
                (self._root(name), name),
            )

    def _think(self, predecessor: int, row: TraceRow, arrival_ns: int) -> tuple[int, int]:
        """Return the think time of a follow-up, and the sum of those up to its own."""
        before_ns, duration_ns, wait_ns = self._execute(
            "SELECT arrival_ns, duration_ns, wait_ns FROM requests WHERE number = ?", (predecessor,)
        ).fetchone()
        think_ns, counts = self._scaled(row.delay_ms), self.counts
        if think_ns is not None:
            counts["think_recorded"] += 1
        else:
            pause_ns = arrival_ns - before_ns - (duration_ns or 0)
            counts["think_from_arrivals" if duration_ns is None else "think_from_ends"] += 1
            counts["overlapping"] += pause_ns < 0
            think_ns = max(pause_ns, 0)
        # Longer times are rejected, and need not fit into the table.
        think_ns = min(think_ns, MAX_PLAN_NS + 1)
        return think_ns, min(wait_ns + think_ns, MAX_PLAN_NS + 1)

    def _group(self, planned: PlannedRequest, last: int | None, predecessor: int | None) -> int:
        """Return the group of a request: a new one if it neither follows nor has a session."""
        of_request = "SELECT session_group FROM requests WHERE number = ?"
        linked = {number for number in (last, predecessor) if number is not None}
        roots = {self._root(self._one(of_request, number)) for number in linked}
        if not roots:
            is_own = self._share == ALL or digest_of(planned) % self._share.count == (
                self._share.index
            )
            self._execute("INSERT INTO groups VALUES (?, NULL, ?)", (planned.number, is_own))
            return planned.number
        first = min(roots)
        for later in roots - {first}:
            self._execute("UPDATE groups SET joined = ? WHERE name = ?", (first, later))
        return first

    def _root(self, name: int | None) -> int:
        """Return the group that a group was joined with, directly or by way of others."""
        while name is not None:
            root = name
            name = self._one("SELECT joined FROM groups WHERE name = ?", root)
        return root

    def _one(self, query: str, key: int) -> int | None:
        """Return the value that a query finds; None if there is none."""
        found = self._execute(query, (key,)).fetchone()
        return None if found is None else found[0]

    def _scaled(self, ms: float | None) -> int | None:
        """Return a duration at the speed of the run, in nanoseconds; None if it is unknown."""
        if ms is None:
            return None
        return ms_to_ns(ms) * self._speed.denominator // self._speed.numerator


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
