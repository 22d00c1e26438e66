"""The reconciliation of one service: observe, decide, apply, and keep state for the next one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from goodput_core.control.decision import decision_summary
from goodput_operator.reconcile.observe import ServiceRecord
from goodput_operator.reconcile.work_queue import Result

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_operator.kube.cache import Cache, Key
    from goodput_operator.reconcile.actions import Decision
    from goodput_operator.reconcile.apply import Applier
    from goodput_operator.reconcile.metrics import OperatorMetrics
    from goodput_operator.reconcile.observe import Collector, Observer
    from goodput_operator.reconcile.snapshot import Snapshot

__all__ = ["EVENT_DECISION", "EVENT_ROLLOUT", "Reconciler"]

EVENT_DECISION: Final = "decision"
"""Log event of each change that the control laws apply or recommend, with its inputs."""
EVENT_ROLLOUT: Final = "rollout"
"""Log event of each step of a gate or rollout, with the reason and message of its Event."""
_log = logging.getLogger(__name__)


class Reconciler:
    """Reconciles services, and owns their records.

    Args:
        cache: cache of the watched objects.
        observer: takes the snapshot.
        decide: returns the decision on a snapshot.
        applier: carries out the actions.
        measure: collector of measurements, which is notified of deleted services.
        metrics: counts reconciliations and decisions.
    """

    def __init__(
        self,
        *,
        cache: Cache,
        observer: Observer,
        decide: Callable[[Snapshot], Decision],
        applier: Applier,
        measure: Collector,
        metrics: OperatorMetrics,
    ) -> None:
        self._cache = cache
        self._observer = observer
        self._decide = decide
        self._applier = applier
        self._measure = measure
        self._metrics = metrics
        self._records: dict[Key, ServiceRecord] = {}

    async def reconcile(self, key: Key) -> Result:
        """Reconcile one service; calls for the same key must not overlap.

        Raises:
            LeaseLostError: the Lease is no longer held.
        """
        service = self._cache.service(key)
        record = self._records.get(key)
        if record is not None and (service is None or service["metadata"]["uid"] != record.uid):
            del self._records[key]
            self._measure.forget(record.uid)
            self._metrics.remove_service(key)
            record = None
        if service is None:
            return Result(deleted=True)
        if record is None:
            record = self._records[key] = ServiceRecord(uid=service["metadata"]["uid"])
        with self._metrics.time_reconciliation():
            self._log_phase(key, "observe")
            snapshot = await self._observer.observe(key, service, record)
            self._log_phase(key, "decide")
            decision = self._decide(snapshot)
            # Foreign objects whose name is no longer needed are not read again.
            record.foreign = {
                place: body for place, body in record.foreign.items() if place in decision.foreign
            }
            record.tagged_image = decision.tagged_image
            self._log_phase(key, "apply")
            outcome = await self._applier.carry_out(snapshot, decision.actions, record)
            self._log_phase(key, "done")
        stored = record.written or snapshot.service
        memory = decision.memory
        self._metrics.set_service(
            key,
            spec=None if memory.spec is None else memory.spec[1],
            desired_replicas=None if memory.setpoint is None else memory.setpoint.replicas,
            status=stored.get("status") or {},
        )
        self._metrics.count_decisions(key, decision.changes)
        self._log_decisions(key, decision)
        for emit in decision.rollout:
            if emit not in record.rollout:
                level = logging.WARNING if emit.warning else logging.INFO
                fields = {"reason": emit.reason, "detail": emit.message}
                _log.log(level, EVENT_ROLLOUT, extra={**_service_fields(key), **fields})
        record.rollout = decision.rollout
        for event, messages, last_messages in (
            ("rejected", outcome.failures, record.failures),
            ("delayed", outcome.delayed, record.delayed),
        ):
            for (kind, name), text in messages.items():
                if last_messages.get((kind, name)) != text:
                    fields = {"kind": kind, "object": name, "detail": text}
                    _log.warning(event, extra={**_service_fields(key), **fields})
        record.failures, record.delayed = outcome.failures, outcome.delayed
        record.memory = memory
        return Result(failed=outcome.transient, again_at_ns=decision.wake_at_ns)

    def _log_phase(self, key: Key, phase: str) -> None:
        _log.debug("phase", extra={**_service_fields(key), "phase": phase})

    def _log_decisions(self, key: Key, decision: Decision) -> None:
        control_decision = decision.control_decision
        inputs = {} if control_decision is None else decision_summary(control_decision)
        for change in decision.changes:
            fields = {
                "knob": change.knob.value,
                "reason": change.reason,
                "detail": change.message,
                "applied": change.applied,
                "inputs": inputs,
            }
            _log.info(EVENT_DECISION, extra={**_service_fields(key), **fields})


def _service_fields(key: Key) -> dict[str, str]:
    return {"namespace": key[0], "llmservice": key[1]}
