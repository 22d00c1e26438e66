"""The work queue: one reconciliation per key, none lost, none early, no key starved."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.builders.examples import examples

from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_operator.backoff import BackOff
from goodput_operator.reconcile.work_queue import DEFAULT_GAP_NS, WorkQueue

BACK_OFF = BackOff(first_ns=500 * NS_PER_MS, max_ns=30 * NS_PER_S)
KEYS = st.sampled_from(["a", "b", "c", "d"])
STEPS = st.integers(0, 2 * NS_PER_S)


def drain(queue: WorkQueue[str], now_ns: int) -> list[str]:
    """Take and finish every due key."""
    taken = []
    while (key := queue.take(now_ns)) is not None:
        taken.append(key)
    for key in taken:
        queue.finish(key, now_ns, failed=False)
    return taken


def test_many_requests_before_a_reconciliation_lead_to_one() -> None:
    queue: WorkQueue[str] = WorkQueue(BACK_OFF)
    for now_ns in range(5):
        queue.add("a", now_ns)
    assert drain(queue, 5) == ["a"]
    assert drain(queue, NS_PER_S) == []


def test_a_request_during_a_reconciliation_leads_to_one_more() -> None:
    queue: WorkQueue[str] = WorkQueue(BACK_OFF)
    queue.add("a", 0)
    assert queue.take(0) == "a"
    queue.add("a", 1)
    queue.add("a", 2)
    assert queue.take(3) is None, "one reconciliation at a time"
    queue.finish("a", 10, failed=False)
    assert queue.take(10) is None, "a burst of events leads to one reconciliation"
    assert drain(queue, 10 + DEFAULT_GAP_NS) == ["a"]
    assert drain(queue, NS_PER_S) == []


def test_a_later_request_does_not_delay_an_earlier_one() -> None:
    queue: WorkQueue[str] = WorkQueue(BACK_OFF)
    queue.add("a", 10)
    queue.add("a", 1000)
    assert queue.next_ns() == 10
    queue.add("a", 5)
    assert queue.next_ns() == 5


def test_keys_are_taken_in_the_order_of_their_requests() -> None:
    queue: WorkQueue[str] = WorkQueue(BACK_OFF)
    for key in "cab":
        queue.add(key, 7)
    assert drain(queue, 7) == ["c", "a", "b"]


def test_a_request_does_not_shorten_the_back_off_of_a_failed_key() -> None:
    queue: WorkQueue[str] = WorkQueue(BACK_OFF)
    now_ns, delays = 0, []
    queue.add("a", now_ns)
    for _ in range(12):
        assert queue.take(now_ns) == "a"
        queue.finish("a", now_ns, failed=True)
        queue.add("a", now_ns)
        again_ns = queue.next_ns()
        assert again_ns is not None
        delays.append(again_ns - now_ns)
        assert queue.take(again_ns - 1) is None
        now_ns = again_ns
    assert delays[0] >= BACK_OFF.first_ns * 3 // 4
    assert all(delay <= BACK_OFF.max_ns for delay in delays)
    assert delays[-1] >= BACK_OFF.max_ns * 3 // 4, "the delay doubles up to its maximum"


def test_a_success_ends_the_back_off() -> None:
    queue: WorkQueue[str] = WorkQueue(BACK_OFF)
    queue.add("a", 0)
    for now_ns in (0, 60 * NS_PER_S, 120 * NS_PER_S):
        assert queue.take(now_ns) == "a"
        queue.finish("a", now_ns, failed=True)
    assert queue.take(300 * NS_PER_S) == "a"
    queue.finish("a", 300 * NS_PER_S, failed=False)
    queue.add("a", 300 * NS_PER_S)
    assert queue.next_ns() == 300 * NS_PER_S + DEFAULT_GAP_NS


def test_a_request_shortens_the_delay_until_the_next_reconciliation() -> None:
    queue: WorkQueue[str] = WorkQueue(BACK_OFF)
    queue.add("a", 0)
    assert queue.take(0) == "a"
    queue.finish("a", 0, failed=False, again_at_ns=10 * NS_PER_S)
    assert queue.next_ns() == 10 * NS_PER_S
    queue.add("a", NS_PER_S)
    assert drain(queue, NS_PER_S) == ["a"]
    assert queue.next_ns() is None, "the earliest request counts"


def test_a_forgotten_key_leaves_no_state_unless_it_is_requested_again() -> None:
    queue: WorkQueue[str] = WorkQueue(BACK_OFF)
    queue.add("a", 0)
    queue.take(0)
    queue.add("a", 1)
    queue.finish("a", 1, failed=False)
    queue.forget("a")
    assert drain(queue, NS_PER_S) == ["a"], "another service of the name was created"
    queue.forget("a")
    assert queue.waiting() == 0
    assert queue.next_ns() is None


def test_ages_of_overdue_and_running_keys_are_reported() -> None:
    queue: WorkQueue[str] = WorkQueue(BACK_OFF)
    assert queue.overdue_ns(100) == 0
    assert queue.oldest_running_ns(100) == 0
    queue.add("a", 100)
    queue.add("b", 150)
    assert queue.take(100) == "a"
    assert queue.overdue_ns(400) == 250
    assert queue.oldest_running_ns(400) == 300


@dataclass
class KeyModel:
    """A simple model of the state of one key."""

    due_ns: int | None = None
    not_before_ns: int = 0
    failures: int = 0
    running: bool = False

    @property
    def start_ns(self) -> int | None:
        if self.due_ns is None or self.running:
            return None
        return max(self.due_ns, self.not_before_ns)


class QueueMachine(RuleBasedStateMachine):
    """Compare the queue with the model in any order of requests, starts and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: WorkQueue[str] = WorkQueue(BACK_OFF)
        self.requests: dict[str, KeyModel] = {}
        self.now_ns = 0

    def request(self, key: str, at_ns: int) -> None:
        request = self.requests.setdefault(key, KeyModel())
        request.due_ns = at_ns if request.due_ns is None else min(request.due_ns, at_ns)

    @rule(step=STEPS)
    def time_passes(self, step: int) -> None:
        self.now_ns += step

    @rule(key=KEYS, later=st.one_of(st.just(0), STEPS))
    def a_key_is_requested(self, key: str, later: int) -> None:
        self.queue.add(key, self.now_ns + later)
        self.request(key, self.now_ns + later)

    @rule()
    def a_reconciliation_starts(self) -> None:
        starts = {k: r.start_ns for k, r in self.requests.items() if r.start_ns is not None}
        first = min(starts.values(), default=None)
        key = self.queue.take(self.now_ns)
        if first is None or first > self.now_ns:
            assert key is None, "no key was due"
            return
        assert key is not None, "a key was due"
        assert starts[key] == first, "the earliest key is taken"
        self.requests[key].running = True
        self.requests[key].due_ns = None

    @precondition(lambda self: any(r.running for r in self.requests.values()))
    @rule(data=st.data(), failed=st.booleans(), again=st.one_of(st.none(), STEPS))
    def a_reconciliation_ends(self, data: st.DataObject, failed: bool, again: int | None) -> None:
        key = data.draw(st.sampled_from([k for k, r in self.requests.items() if r.running]))
        at_ns = None if again is None else self.now_ns + again
        self.queue.finish(key, self.now_ns, failed=failed, again_at_ns=at_ns)
        request = self.requests[key]
        request.running = False
        request.failures = request.failures + 1 if failed else 0
        delay_ns = BACK_OFF.delay_ns(key, request.failures) if failed else DEFAULT_GAP_NS
        request.not_before_ns = self.now_ns + delay_ns
        if failed:
            self.request(key, request.not_before_ns)
        if at_ns is not None:
            self.request(key, at_ns)

    @rule(key=KEYS)
    def a_key_is_forgotten(self, key: str) -> None:
        self.queue.forget(key)
        request = self.requests.get(key)
        if request is not None and request.due_ns is None and not request.running:
            del self.requests[key]

    @invariant()
    def no_request_is_lost_or_early(self) -> None:
        starts = [r.start_ns for r in self.requests.values() if r.start_ns is not None]
        assert self.queue.next_ns() == min(starts, default=None)
        requested = sum(r.due_ns is not None for r in self.requests.values())
        assert self.queue.waiting() == requested


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(KEYS, st.booleans()), max_size=60))
@settings(max_examples=examples(60), deadline=None)
def test_every_requested_key_is_reconciled_while_others_fail(
    requests: list[tuple[str, bool]],
) -> None:
    queue: WorkQueue[str] = WorkQueue(BACK_OFF)
    reconciled: set[str] = set()
    now_ns = 0
    for key, fails in requests:
        queue.add(key, now_ns)
        if (taken := queue.take(now_ns)) is not None:
            reconciled.add(taken)
            queue.finish(taken, now_ns, failed=fails)
        now_ns += 10 * NS_PER_MS
    for _ in range(200):
        now_ns += NS_PER_S
        reconciled.update(drain(queue, now_ns))
    assert reconciled == {key for key, _ in requests}
    assert queue.waiting() == 0
