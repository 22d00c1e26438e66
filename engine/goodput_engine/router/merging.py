"""The state and the metrics of several router processes as those of one router.

All processes have the same manifest, replicas and monotonic clock. The functions take the responses
of their admin ports, and do no I/O.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from goodput_core.contract import (
    LABEL_TENANT,
    METRIC_BUILD_INFO,
    METRIC_ROUTER_REPLICA_UP,
    METRIC_TENANT_WEIGHT,
)
from goodput_core.tenants.tenant_list import OTHER_TENANTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["merge_metrics", "merge_states"]

_SUMS: Final = ("arrivals", "in_flight", "client_errors", "judged_on_e2e_only")
_SUMS_BY_NAME: Final = ("outcomes", "promises", "retries")
_SMALLEST: Final = frozenset(
    {
        METRIC_ROUTER_REPLICA_UP,
        METRIC_BUILD_INFO,
        METRIC_TENANT_WEIGHT,
        "process_start_time_seconds",
    }
)


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of the router, without `epoch` and `uptime_seconds`.

    Counts are added up. A replica is ready if it is ready for every process, and saturated if it is
    so for one. The load that a replica reports is that of the first process which lists it. A
    problem of one process with its tenants is that of the router.

    Args:
        states: responses of `/control/state`, at least one; all with or all without `seconds`.
    """
    merged = {k: v for k, v in states[0].items() if k not in {"epoch", "uptime_seconds"}}
    merged["tenants_problem"] = next((p for s in states if (p := s["tenants_problem"])), "")
    merged["draining"] = any(state["draining"] for state in states)
    for name in _SUMS:
        merged[name] = sum(state[name] for state in states)
    for name in _SUMS_BY_NAME:
        merged[name] = _add([state[name] for state in states])
    merged["replicas"] = _merge_replicas([state["replicas"] for state in states])
    if "seconds" in merged:
        merged["seconds"] = _merge_seconds([state["seconds"] for state in states])
    return merged


def merge_metrics(texts: Sequence[str]) -> bytes:
    """Return the metrics of the router in Prometheus' text format.

    Values are added up, apart from versions, start times, the weights of tenants and the readiness
    of replicas, of which the smallest is used. The series of a tenant that not all processes have
    are left out: it was just added or removed, and their sum would fall.
    """
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    processes: Counter[str] = Counter()
    for text in texts:
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged = values.setdefault(family.name, {})
            smallest = family.name in _SMALLEST
            if family.name == METRIC_TENANT_WEIGHT:
                processes.update(sample.labels[LABEL_TENANT] for sample in family.samples)
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                earlier = merged.get(key)
                if earlier is None:
                    merged[key] = sample.value
                else:
                    merged[key] = min(earlier, sample.value) if smallest else earlier + sample.value
    for name, family in families.items():
        for (sample_name, labels), value in values[name].items():
            tenant = dict(labels).get(LABEL_TENANT, OTHER_TENANTS)
            if tenant == OTHER_TENANTS or processes[tenant] == len(texts):
                family.add_sample(sample_name, dict(labels), value)
    registry = CollectorRegistry()
    registry.register(_Families(tuple(families.values())))
    return generate_latest(registry)


class _Families(Collector):
    """Metrics whose values are already known."""

    def __init__(self, families: tuple[Metric, ...]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _add(values: Sequence[Any]) -> Any:
    """Add up numbers, or objects of numbers by their names."""
    if not isinstance(values[0], dict):
        return sum(values)
    names = dict.fromkeys(name for value in values for name in value)
    return {name: _add([value[name] for value in values if name in value]) for name in names}


def _merge_replicas(lists: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    by_name: dict[str, list[dict[str, Any]]] = {}
    for replicas in lists:
        for replica in replicas:
            by_name.setdefault(replica["name"], []).append(replica)
    return [
        {
            **views[0],
            "ready": all(view["ready"] for view in views),
            "detail": next((view["detail"] for view in views if not view["ready"]), ""),
            "draining": any(view["draining"] for view in views),
            "saturated": any(view["saturated"] for view in views),
            "in_flight": sum(view["in_flight"] for view in views),
        }
        for views in by_name.values()
    ]


def _merge_seconds(rings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up the counts of the seconds that are complete in all processes.

    A process that started later has no requests in the seconds before.
    """
    end_s = min(ring["end_s"] for ring in rings)
    first_s = min(end_s, *(ring["first_s"] for ring in rings))
    classes: dict[str, dict[str, list[int]]] = {}
    for ring in rings:
        for name, counts in ring["classes"].items():
            sums = classes.setdefault(
                name, {key: [0] * (end_s - first_s) for key in ("good", "total")}
            )
            for key, values in counts.items():
                for second, value in enumerate(values, ring["first_s"]):
                    if second < end_s:
                        sums[key][second - first_s] += value
    requested = {name: counts for name, counts in classes.items() if any(counts["total"])}
    return {"first_s": first_s, "end_s": end_s, "classes": requested}
