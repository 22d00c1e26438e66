"""The ConfigMap of a service: manifests for engines and routers, and the last setpoint.

The setpoint is stored for times without an operator. An engine that starts then uses the last
limits, and a restarted operator continues with the last limits and replicas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import API_VERSION, KIND_LLMSERVICE, MAX_LIMITS_REVISION
from goodput_core.control import Bounds, Setpoint
from goodput_core.spec.choices import ControlMode
from goodput_core.spec.codec import encode
from goodput_operator.render.pods import LIMITS_KEY, ROUTER_MANIFEST_KEY, manifest_key
from goodput_operator.render.revisions import Revision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.render.metadata import Owner

__all__ = ["GateConfig", "config_map", "gate_key", "read_gate_setpoint", "read_setpoint"]

_REPLICAS_KEY: Final = "replicas"
_GATE_KEY: Final = "gate"
_MODEL_FIELDS: Final = ("source", "revision")
_NOT_READ_BY_ENGINES: Final = (
    "image",
    "runtime",
    "resources",
    "pod",
    "drainSeconds",
    "startupDeadlineSeconds",
)
_ROUTED_RUNTIME_FIELDS: Final = ("kind", "image", "healthPath")
_LIMITS_FIELDS: Final = (
    "revision",
    "min_tokens",
    "token_budget",
    "safety_percent",
    "max_num_seqs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """Inputs of the engines of a gate, which run without control and with equal limits.

    Args:
        key: key of the gate.
        engines: revision of each engine by its role; without a baseline if that is recorded.
        setpoint: their limits, which stay those at the start of the gate.
    """

    key: str
    engines: Mapping[str, Revision]
    setpoint: Setpoint


def config_map(
    owner: Owner,
    spec: LLMServiceSpec,
    revisions: Sequence[Revision],
    setpoint: Setpoint,
    gate: GateConfig | None = None,
) -> dict[str, Any]:
    """Render the ConfigMap of a service.

    Args:
        owner: the service.
        spec: the current spec of the service.
        revisions: engine revisions whose pods may still start.
        setpoint: limits and replicas to store.
        gate: inputs of the engines of a gate; None without a gate.
    """
    data = {ROUTER_MANIFEST_KEY: _router_manifest(owner, spec)}
    for revision in revisions:
        if "runtime" in revision.source["engine"]:
            continue  # another server reads no manifest
        data[manifest_key(revision.name)] = _manifest(owner, revision.source, spec)
    data[LIMITS_KEY] = _limits(setpoint)
    data[_REPLICAS_KEY] = str(setpoint.replicas)
    if gate is not None:
        manual = replace(spec, control=replace(spec.control, mode=ControlMode.MANUAL))
        for revision in gate.engines.values():
            key = gate_key(manifest_key(revision.name))
            data[key] = _manifest(owner, revision.source, manual)
        data[gate_key(LIMITS_KEY)] = _limits(gate.setpoint)
        data[_GATE_KEY] = gate.key
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owner.metadata(owner.names.config),
        "data": data,
    }


def gate_key(key: str) -> str:
    """Return the key under which the engines of a gate find another value."""
    return f"gate-{key}"


def read_gate_setpoint(stored: Mapping[str, Any], key: str) -> Setpoint | None:
    """Read the stored setpoint of a gate; None if the ConfigMap has none of the gate's key."""
    data = stored.get("data") or {}
    if data.get(_GATE_KEY) != key:
        return None
    limits = {**data, LIMITS_KEY: data.get(gate_key(LIMITS_KEY), "")}
    return read_setpoint({"data": limits})


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


def _limits(setpoint: Setpoint) -> str:
    bounds = setpoint.bounds
    values = (
        setpoint.limits_revision,
        bounds.min_tokens,
        bounds.max_tokens,
        bounds.safety_percent,
        bounds.max_num_seqs,
    )
    return _json(dict(zip(_LIMITS_FIELDS, values, strict=True)))


def _router_manifest(owner: Owner, spec: LLMServiceSpec) -> str:
    model = encode(spec.model)
    if spec.engine.runtime.health_path is None:
        return _manifest(owner, {"model": model}, spec)
    runtime = encode(spec.engine.runtime)
    # Other fields of the engine have their defaults, which are valid together.
    engine = {"runtime": {name: runtime[name] for name in _ROUTED_RUNTIME_FIELDS}}
    return _render(owner, model, engine, spec)


def _manifest(owner: Owner, source: Mapping[str, Any], spec: LLMServiceSpec) -> str:
    engine = {k: v for k, v in source.get("engine", {}).items() if k not in _NOT_READ_BY_ENGINES}
    if budget := encode(spec.engine.token_budget):
        engine["tokenBudget"] = budget
    return _render(owner, source["model"], engine, spec)


def _render(
    owner: Owner, model: Mapping[str, Any], engine: Mapping[str, Any], spec: LLMServiceSpec
) -> str:
    """Render only the fields that a process reads, since its version may be older."""
    parts = {
        "engine": engine,
        "router": {"policy": spec.router.policy.value, **_session_affinity(spec)},
        "slo": encode(spec.slo),
        "control": {"mode": spec.control.mode.value},
    }
    model = {k: v for k, v in model.items() if k in _MODEL_FIELDS}
    return _json(
        {
            "apiVersion": API_VERSION,
            "kind": KIND_LLMSERVICE,
            "metadata": {"name": owner.name},
            "spec": {"model": model, **{k: v for k, v in parts.items() if v}},
        }
    )


def _session_affinity(spec: LLMServiceSpec) -> dict[str, Any]:
    affinity = spec.router.session_affinity
    return {} if affinity is None else {"sessionAffinity": encode(affinity)}


def _json(value: Mapping[str, Any]) -> str:
    # Sorted, because the API server returns the keys of stored objects in another order.
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_LIMITS_REVISION:
        raise ValueError(value)
    return value
