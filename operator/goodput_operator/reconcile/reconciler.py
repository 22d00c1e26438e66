"""One turn of one service: observe, decide, apply; then remember what matters for the next."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from goodput_operator.reconcile.record import Record
from goodput_operator.reconcile.workers import Turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_operator.kube.cache import Cache, Key
    from goodput_operator.reconcile.actions import Decision
    from goodput_operator.reconcile.apply import Applier
    from goodput_operator.reconcile.metrics import OperatorMetrics
    from goodput_operator.reconcile.observe import Measure, Observer
    from goodput_operator.reconcile.snapshot import Snapshot

__all__ = ["Rounds"]

_log = logging.getLogger(__name__)


class Rounds:
    """Gives turns, and owns what is remembered between them.

    Args:
        cache: the watched objects.
        observer: makes the snapshot.
        decide: pure.
        applier: carries out.
        measure: told of services that are gone.
        metrics: told what happened.
    """

    def __init__(
        self,
        *,
        cache: Cache,
        observer: Observer,
        decide: Callable[[Snapshot], Decision],
        applier: Applier,
        measure: Measure,
        metrics: OperatorMetrics,
    ) -> None:
        self._cache = cache
        self._observer = observer
        self._decide = decide
        self._applier = applier
        self._measure = measure
        self._metrics = metrics
        self._records: dict[Key, Record] = {}

    async def turn(self, key: Key) -> Turn:
        """What `Workers` calls, for one key never twice at once.

        Raises:
            LeaseLostError: another operator may write by now.
        """
        service = self._cache.service(key)
        record = self._records.get(key)
        if record is not None and (service is None or service["metadata"]["uid"] != record.uid):
            del self._records[key]
            self._measure.forget(record.uid)
            self._metrics.forget(key)
            record = None
        if service is None:
            return Turn(gone=True)
        if record is None:
            record = self._records[key] = Record(uid=service["metadata"]["uid"])
        with self._metrics.turn():
            self._phase(key, "observe")
            snapshot = await self._observer.observe(key, service, record)
            self._phase(key, "decide")
            decision = self._decide(snapshot)
            # What nothing of ours would stand in place of any more is nobody's concern.
            record.foreign = {
                place: body for place, body in record.foreign.items() if place in decision.foreign
            }
            self._phase(key, "apply")
            outcome = await self._applier.carry_out(snapshot, decision.actions, record)
            self._phase(key, "done")
        stored = record.written or snapshot.service
        self._metrics.status(key, stored.get("status") or {})
        self._metrics.decided(key, decision.changes)
        for event, now, before in (
            ("refused", outcome.failures, record.failures),
            ("delayed", outcome.delayed, record.delayed),
        ):
            for (kind, name), words in now.items():
                if before.get((kind, name)) != words:
                    fields = {"kind": kind, "name_": name, "words": words}
                    _log.warning(event, extra={**_fields(key), **fields})
        record.failures, record.delayed = outcome.failures, outcome.delayed
        record.memory = decision.memory
        return Turn(failed=outcome.transient, again_at_ns=decision.wake_at_ns)

    def _phase(self, key: Key, phase: str) -> None:
        _log.debug("phase", extra={**_fields(key), "phase": phase})


def _fields(key: Key) -> dict[str, str]:
    return {"namespace": key[0], "llmservice": key[1]}
