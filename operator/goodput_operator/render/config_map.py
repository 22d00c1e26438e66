"""The ConfigMap: what engines and routers read when they start, and what was decided last.

It holds decisions so that they outlive the operator: an engine that starts while nobody looks
after it begins with the last limits, and an operator that starts goes on from them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import API_VERSION, KIND_LLMSERVICE, MAX_LIMITS_REVISION
from goodput_core.control import Bounds
from goodput_core.spec.encode import encode
from goodput_operator.control.decided import Decided
from goodput_operator.render.engine_pod import LIMITS_KEY, manifest_key
from goodput_operator.render.router_pod import ROUTER_MANIFEST_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.render.metadata import Owner
    from goodput_operator.render.revisions import Revision

__all__ = ["config_map", "read_decided"]

_REPLICAS_KEY: Final = "replicas"
_OF_MODEL: Final = ("source", "revision")
_NOT_OF_ENGINE: Final = ("image", "resources", "pod", "drainSeconds", "startupDeadlineSeconds")
_MOST: Final = MAX_LIMITS_REVISION
"""The revision may rise so far; no other number comes near it."""
_ENTRIES: Final = ("revision", "min_tokens", "token_budget", "safety_percent", "max_num_seqs")


def config_map(
    owner: Owner, spec: LLMServiceSpec, revisions: Sequence[Revision], decided: Decided
) -> dict[str, Any]:
    """The ConfigMap of a service.

    Args:
        owner: the service.
        spec: what it asks for now.
        revisions: of the engines that may still start.
        decided: what is to outlive the operator.
    """
    data = {ROUTER_MANIFEST_KEY: _manifest(owner, {"model": encode(spec.model)}, spec)}
    for revision in revisions:
        data[manifest_key(revision.name)] = _manifest(owner, revision.asked, spec)
    bounds = decided.bounds
    values = (
        decided.limits_revision,
        bounds.min_tokens,
        bounds.max_tokens,
        bounds.safety_percent,
        bounds.max_num_seqs,
    )
    data[LIMITS_KEY] = _text(dict(zip(_ENTRIES, values, strict=True)))
    data[_REPLICAS_KEY] = str(decided.replicas)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owner.metadata(owner.names.config),
        "data": data,
    }


def read_decided(stored: Mapping[str, Any]) -> Decided | None:
    """What a ConfigMap says was decided last; None where it says nothing that can be read."""
    data = stored.get("data") or {}
    try:
        limits = json.loads(data.get(LIMITS_KEY, ""))
        revision, least, most, safety, width = (_whole(limits[entry]) for entry in _ENTRIES)
        replicas = _whole(int(data.get(_REPLICAS_KEY, "")))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    bounds = Bounds(min_tokens=least, max_tokens=most, safety_percent=safety, max_num_seqs=width)
    return Decided(limits_revision=revision, bounds=bounds, replicas=replicas)


def _manifest(owner: Owner, asked: Mapping[str, Any], spec: LLMServiceSpec) -> str:
    """A manifest of what a process reads of it, and no more: the process may be an older one."""
    engine = {k: v for k, v in asked.get("engine", {}).items() if k not in _NOT_OF_ENGINE}
    if budget := encode(spec.engine.token_budget):
        engine["tokenBudget"] = budget
    parts = {
        "engine": engine,
        "router": {"policy": spec.router.policy.value},
        "slo": encode(spec.slo),
        "control": {"mode": spec.control.mode.value},
    }
    model = {k: v for k, v in asked["model"].items() if k in _OF_MODEL}
    return _text(
        {
            "apiVersion": API_VERSION,
            "kind": KIND_LLMSERVICE,
            "metadata": {"name": owner.name},
            "spec": {"model": model, **{k: v for k, v in parts.items() if v}},
        }
    )


def _text(value: Mapping[str, Any]) -> str:
    # Sorted: what is read back from the API server comes in another order.
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(value)
    return value
