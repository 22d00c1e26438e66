"""The work queue: one reconciliation per key, none lost, none early, no key starved."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_operator.backoff import BackOff
from goodput_operator.reconcile.work_queue import GAP_NS, WorkQueue

BACK_OFF = BackOff(first_ns=500 * NS_PER_MS, most_ns=30 * NS_PER_S)
KEYS = st.sampled_from(["a", "b", "c", "d"])
STEPS = st.integers(0, 2 * NS_PER_S)


def drained(schedule: WorkQueue[str], now_ns: int) -> list[str]:
    """Take and finish every due key."""
    turns = []
    while (key := schedule.take(now_ns)) is not None:
        turns.append(key)
    for key in turns:
        schedule.finish(key, now_ns, failed=False)
    return turns


def test_many_requests_before_a_reconciliation_lead_to_one() -> None:
    schedule: WorkQueue[str] = WorkQueue(BACK_OFF)
    for now_ns in range(5):
        schedule.add("a", now_ns)
    assert drained(schedule, 5) == ["a"]
    assert drained(schedule, NS_PER_S) == []


def test_a_request_during_a_reconciliation_leads_to_one_more() -> None:
    schedule: WorkQueue[str] = WorkQueue(BACK_OFF)
    schedule.add("a", 0)
    assert schedule.take(0) == "a"
    schedule.add("a", 1)
    schedule.add("a", 2)
    assert schedule.take(3) is None, "one turn at a time"
    schedule.finish("a", 10, failed=False)
    assert schedule.take(10) is None, "a burst of events is one turn"
    assert drained(schedule, 10 + GAP_NS) == ["a"]
    assert drained(schedule, NS_PER_S) == []


def test_a_later_wish_does_not_put_off_an_earlier_one() -> None:
    schedule: WorkQueue[str] = WorkQueue(BACK_OFF)
    schedule.add("a", 10)
    schedule.add("a", 1000)
    assert schedule.next_ns() == 10
    schedule.add("a", 5)
    assert schedule.next_ns() == 5


def test_keys_are_taken_in_the_order_of_their_requests() -> None:
    schedule: WorkQueue[str] = WorkQueue(BACK_OFF)
    for key in "cab":
        schedule.add(key, 7)
    assert drained(schedule, 7) == ["c", "a", "b"]


def test_no_event_brings_a_failed_key_back_before_its_rest_is_over() -> None:
    schedule: WorkQueue[str] = WorkQueue(BACK_OFF)
    now_ns, rests = 0, []
    schedule.add("a", now_ns)
    for _ in range(12):
        assert schedule.take(now_ns) == "a"
        schedule.finish("a", now_ns, failed=True)
        schedule.add("a", now_ns)
        again_ns = schedule.next_ns()
        assert again_ns is not None
        rests.append(again_ns - now_ns)
        assert schedule.take(again_ns - 1) is None
        now_ns = again_ns
    assert rests[0] >= BACK_OFF.first_ns * 3 // 4
    assert all(rest <= BACK_OFF.most_ns for rest in rests)
    assert rests[-1] >= BACK_OFF.most_ns * 3 // 4, "it doubles up to its bound"


def test_a_success_ends_the_back_off() -> None:
    schedule: WorkQueue[str] = WorkQueue(BACK_OFF)
    schedule.add("a", 0)
    for now_ns in (0, 60 * NS_PER_S, 120 * NS_PER_S):
        assert schedule.take(now_ns) == "a"
        schedule.finish("a", now_ns, failed=True)
    assert schedule.take(300 * NS_PER_S) == "a"
    schedule.finish("a", 300 * NS_PER_S, failed=False)
    schedule.add("a", 300 * NS_PER_S)
    assert schedule.next_ns() == 300 * NS_PER_S + GAP_NS


def test_a_delayed_turn_comes_at_its_time_and_an_event_brings_it_forward() -> None:
    schedule: WorkQueue[str] = WorkQueue(BACK_OFF)
    schedule.add("a", 0)
    assert schedule.take(0) == "a"
    schedule.finish("a", 0, failed=False, again_at_ns=10 * NS_PER_S)
    assert schedule.next_ns() == 10 * NS_PER_S
    schedule.add("a", NS_PER_S)
    assert drained(schedule, NS_PER_S) == ["a"]
    assert schedule.next_ns() is None, "the earliest request counts"


def test_a_forgotten_key_leaves_nothing_behind_unless_it_is_wanted_again() -> None:
    schedule: WorkQueue[str] = WorkQueue(BACK_OFF)
    schedule.add("a", 0)
    schedule.take(0)
    schedule.add("a", 1)
    schedule.finish("a", 1, failed=False)
    schedule.forget("a")
    assert drained(schedule, NS_PER_S) == ["a"], "a namesake was created meanwhile"
    schedule.forget("a")
    assert schedule.waiting() == 0
    assert schedule.next_ns() is None


def test_ages_tell_what_is_stuck() -> None:
    schedule: WorkQueue[str] = WorkQueue(BACK_OFF)
    assert schedule.overdue_ns(100) == 0
    assert schedule.longest_ns(100) == 0
    schedule.add("a", 100)
    schedule.add("b", 150)
    assert schedule.take(100) == "a"
    assert schedule.overdue_ns(400) == 250
    assert schedule.longest_ns(400) == 300


@dataclass
class Wish:
    """A model of one key by the simplest rule."""

    due_ns: int | None = None
    rest_until_ns: int = 0
    failures: int = 0
    begun: bool = False

    @property
    def start_ns(self) -> int | None:
        if self.due_ns is None or self.begun:
            return None
        return max(self.due_ns, self.rest_until_ns)


class Queue(RuleBasedStateMachine):
    """Any order of wishes, turns and ends against that rule."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule: WorkQueue[str] = WorkQueue(BACK_OFF)
        self.wishes: dict[str, Wish] = {}
        self.now_ns = 0

    def wish(self, key: str, at_ns: int) -> None:
        wish = self.wishes.setdefault(key, Wish())
        wish.due_ns = at_ns if wish.due_ns is None else min(wish.due_ns, at_ns)

    @rule(step=STEPS)
    def time_passes(self, step: int) -> None:
        self.now_ns += step

    @rule(key=KEYS, later=st.one_of(st.just(0), STEPS))
    def somebody_asks(self, key: str, later: int) -> None:
        self.schedule.add(key, self.now_ns + later)
        self.wish(key, self.now_ns + later)

    @rule()
    def a_turn_begins(self) -> None:
        starts = {k: w.start_ns for k, w in self.wishes.items() if w.start_ns is not None}
        first = min(starts.values(), default=None)
        key = self.schedule.take(self.now_ns)
        if first is None or first > self.now_ns:
            assert key is None, "no key was due"
            return
        assert key is not None, "a key was due"
        assert starts[key] == first, "the first in line goes first"
        self.wishes[key].begun = True
        self.wishes[key].due_ns = None

    @precondition(lambda self: any(w.begun for w in self.wishes.values()))
    @rule(data=st.data(), failed=st.booleans(), again=st.one_of(st.none(), STEPS))
    def a_turn_ends(self, data: st.DataObject, failed: bool, again: int | None) -> None:
        key = data.draw(st.sampled_from([k for k, w in self.wishes.items() if w.begun]))
        at_ns = None if again is None else self.now_ns + again
        self.schedule.finish(key, self.now_ns, failed=failed, again_at_ns=at_ns)
        wish = self.wishes[key]
        wish.begun = False
        wish.failures = wish.failures + 1 if failed else 0
        rest_ns = BACK_OFF.delay_ns(key, wish.failures) if failed else GAP_NS
        wish.rest_until_ns = self.now_ns + rest_ns
        if failed:
            self.wish(key, wish.rest_until_ns)
        if at_ns is not None:
            self.wish(key, at_ns)

    @rule(key=KEYS)
    def somebody_is_forgotten(self, key: str) -> None:
        self.schedule.forget(key)
        wish = self.wishes.get(key)
        if wish is not None and wish.due_ns is None and not wish.begun:
            del self.wishes[key]

    @invariant()
    def nothing_is_lost_and_nothing_is_too_soon(self) -> None:
        starts = [w.start_ns for w in self.wishes.values() if w.start_ns is not None]
        assert self.schedule.next_ns() == min(starts, default=None)
        wanted = sum(w.due_ns is not None for w in self.wishes.values())
        assert self.schedule.waiting() == wanted


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(KEYS, st.booleans()), max_size=60))
@settings(max_examples=60, deadline=None)
def test_every_key_that_asks_is_served_however_the_others_fail(
    asked: list[tuple[str, bool]],
) -> None:
    schedule: WorkQueue[str] = WorkQueue(BACK_OFF)
    served: set[str] = set()
    now_ns = 0
    for key, fails in asked:
        schedule.add(key, now_ns)
        if (turn := schedule.take(now_ns)) is not None:
            served.add(turn)
            schedule.finish(turn, now_ns, failed=fails)
        now_ns += 10 * NS_PER_MS
    for _ in range(200):
        now_ns += NS_PER_S
        served.update(drained(schedule, now_ns))
    assert served == {key for key, _ in asked}
    assert schedule.waiting() == 0
