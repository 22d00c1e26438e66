"""The ConfigMap of a service: manifests for engines and routers, and the last setpoint.

The setpoint is stored for times without an operator. An engine that starts then uses the last
limits, and a restarted operator continues with the last limits and replicas.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import API_VERSION, KIND_LLMSERVICE, MAX_LIMITS_REVISION
from goodput_core.control import Bounds, Setpoint
from goodput_core.spec.codec import encode
from goodput_operator.render.pods import LIMITS_KEY, ROUTER_MANIFEST_KEY, manifest_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.render.metadata import Owner
    from goodput_operator.render.revisions import Revision

__all__ = ["config_map", "read_setpoint"]

_REPLICAS_KEY: Final = "replicas"
_MODEL_FIELDS: Final = ("source", "revision")
_NOT_READ_BY_ENGINES: Final = (
    "image",
    "runtime",
    "resources",
    "pod",
    "drainSeconds",
    "startupDeadlineSeconds",
)
_LIMITS_FIELDS: Final = (
    "revision",
    "min_tokens",
    "token_budget",
    "safety_percent",
    "max_num_seqs",
)


def config_map(
    owner: Owner, spec: LLMServiceSpec, revisions: Sequence[Revision], setpoint: Setpoint
) -> dict[str, Any]:
    """Render the ConfigMap of a service.

    Args:
        owner: the service.
        spec: the current spec of the service.
        revisions: engine revisions whose pods may still start.
        setpoint: limits and replicas to store.
    """
    data = {ROUTER_MANIFEST_KEY: _manifest(owner, {"model": encode(spec.model)}, spec)}
    for revision in revisions:
        if "runtime" in revision.source["engine"]:
            continue  # another server reads no manifest
        data[manifest_key(revision.name)] = _manifest(owner, revision.source, spec)
    bounds = setpoint.bounds
    values = (
        setpoint.limits_revision,
        bounds.min_tokens,
        bounds.max_tokens,
        bounds.safety_percent,
        bounds.max_num_seqs,
    )
    data[LIMITS_KEY] = _json(dict(zip(_LIMITS_FIELDS, values, strict=True)))
    data[_REPLICAS_KEY] = str(setpoint.replicas)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owner.metadata(owner.names.config),
        "data": data,
    }


def read_setpoint(stored: Mapping[str, Any]) -> Setpoint | None:
    """Read the stored setpoint; None if the ConfigMap holds no valid one."""
    data = stored.get("data") or {}
    try:
        limits = json.loads(data.get(LIMITS_KEY, ""))
        revision, *values = (_integer(limits[name]) for name in _LIMITS_FIELDS)
        replicas = _integer(int(data.get(_REPLICAS_KEY, "")))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    min_tokens, max_tokens, safety_percent, max_num_seqs = values
    bounds = Bounds(
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        safety_percent=safety_percent,
        max_num_seqs=max_num_seqs,
    )
    return Setpoint(limits_revision=revision, bounds=bounds, replicas=replicas)


def _manifest(owner: Owner, source: Mapping[str, Any], spec: LLMServiceSpec) -> str:
    """Render only the fields that a process reads, since its version may be older."""
    engine = {k: v for k, v in source.get("engine", {}).items() if k not in _NOT_READ_BY_ENGINES}
    if budget := encode(spec.engine.token_budget):
        engine["tokenBudget"] = budget
    parts = {
        "engine": engine,
        "router": {"policy": spec.router.policy.value},
        "slo": encode(spec.slo),
        "control": {"mode": spec.control.mode.value},
    }
    model = {k: v for k, v in source["model"].items() if k in _MODEL_FIELDS}
    return _json(
        {
            "apiVersion": API_VERSION,
            "kind": KIND_LLMSERVICE,
            "metadata": {"name": owner.name},
            "spec": {"model": model, **{k: v for k, v in parts.items() if v}},
        }
    )


def _json(value: Mapping[str, Any]) -> str:
    # Sorted, because the API server returns the keys of stored objects in another order.
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_LIMITS_REVISION:
        raise ValueError(value)
    return value
