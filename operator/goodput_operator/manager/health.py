"""Whether the operator is alive: what it heard, what it finished, what waits.

That the process runs proves nothing: a watch may have ended unnoticed, and a turn may hang. Every
number here is an age, so that a person who reads the probe's answer sees what is stuck.

The ages of the last event and of the last turn are told and are no problem by themselves: in a
cluster in which nothing changes there is no event, and where no service wants a turn none ends.
Judged is what would bring them: that watches are begun again and again, that turns end, and that
some turn ends while a service waits for its own. A queue that is long and moves is no problem of
the process: where many pods do not answer, turns take seconds, and a new process would begin at the
end of the same queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from goodput_core.units import NS_PER_S
from goodput_operator.kube.watch import WATCH_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_operator.kube.fence import Clock, Fence
    from goodput_operator.reconcile.work_queue import Workers

__all__ = ["Health"]

_MOST_SILENCE_NS: Final = 2 * WATCH_S * NS_PER_S
_MOST_STUCK_NS: Final = 120 * NS_PER_S
_MOST_TURN_NS: Final = 300 * NS_PER_S


class Health:
    """Gathers signs of life.

    Args:
        clock: monotonic time.
        paths: of the API server that are watched.
        fence: whether this operator leads.
        workers: who give the turns.
    """

    def __init__(
        self, *, clock: Clock, paths: Iterable[str], fence: Fence, workers: Workers[Any]
    ) -> None:
        self._clock = clock
        self._begun_ns = clock.now_ns()
        self._heard: dict[str, int | None] = dict.fromkeys(paths)
        self._event_ns: int | None = None
        self._fence = fence
        self._workers = workers

    def heard(self, path: str) -> None:
        """The API server let a watch of this path, or the list before it, begin."""
        if path in self._heard:
            self._heard[path] = self._clock.now_ns()

    def event(self) -> None:
        """Something that is watched changed."""
        self._event_ns = self._clock.now_ns()

    @property
    def ready(self) -> bool:
        """Whether everything is being watched."""
        return None not in self._heard.values()

    def problems(self) -> list[str]:
        """Why the process should be ended and begun anew, one sentence each; none: it lives."""
        now_ns = self._clock.now_ns()
        found = []
        for path, heard_ns in self._heard.items():
            silent_ns = now_ns - (self._begun_ns if heard_ns is None else heard_ns)
            if silent_ns > _MOST_SILENCE_NS:
                found.append(f"no watch of {path} has begun for {silent_ns // NS_PER_S} s")
        if self._fence.open:
            stuck_ns = self._stuck_ns(now_ns)
            if stuck_ns > _MOST_STUCK_NS:
                found.append(
                    f"a service waits for its turn, and for {stuck_ns // NS_PER_S} s none has ended"
                )
            longest_ns = self._workers.queue.longest_ns(now_ns)
            if longest_ns > _MOST_TURN_NS:
                found.append(f"a turn has taken {longest_ns // NS_PER_S} s")
        return found

    def _stuck_ns(self, now_ns: int) -> int:
        """For how long a service has waited while no turn ended."""
        overdue_ns = self._workers.queue.overdue_ns(now_ns)
        finished_ns = self._workers.finished_ns
        return overdue_ns if finished_ns is None else min(overdue_ns, now_ns - finished_ns)

    def report(self) -> dict[str, Any]:
        """What a probe answers, as JSON: ages in seconds, None for what has not happened."""
        now_ns = self._clock.now_ns()

        def age(at_ns: int | None) -> float | None:
            return None if at_ns is None else round((now_ns - at_ns) / NS_PER_S, 3)

        return {
            "problems": self.problems(),
            "ready": self.ready,
            "leading": self._fence.open,
            "event_age_seconds": age(self._event_ns),
            "turn_age_seconds": age(self._workers.finished_ns),
            "watch_age_seconds": {path: age(at) for path, at in self._heard.items()},
            "waiting": self._workers.queue.waiting(),
            "overdue_seconds": self._workers.queue.overdue_ns(now_ns) / NS_PER_S,
        }
