"""What of a round is worth an Event: conditions that turned, revisions, and decisions.

`kubectl describe` tells the story of a service by these, so each says something that was not so
before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from goodput_core.spec.status import Truth
from goodput_operator.control.words import Change, Knob
from goodput_operator.decide.actions import Emit
from goodput_operator.decide.attainment import silence_reason
from goodput_operator.decide.conditions import READY, SCALING_LIMITED, SLO_ATTAINED, STALLED, Said

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from goodput_operator.decide.snapshot import Silence

__all__ = ["of_changes", "of_conditions", "of_refusals", "of_revisions", "of_silence"]

_WELL: Final[Mapping[str, tuple[Truth, str]]] = {
    READY: (Truth.TRUE, "Ready"),
    STALLED: (Truth.FALSE, "Recovered"),
    SLO_ATTAINED: (Truth.TRUE, "SLOAttained"),
    SCALING_LIMITED: (Truth.FALSE, "ScalingUnlimited"),
}
"""By condition: the status in which all is well, and what its return is called."""
_KNOBS: Final = {Knob.TOKEN_BUDGET: "TokenBudget", Knob.REPLICAS: "Scaled"}


def of_conditions(said: Sequence[Said], stored: Mapping[str, Any]) -> Iterator[Emit]:
    """Conditions that went wrong or well.

    Args:
        said: the conditions that hold now.
        stored: the status as it stood.
    """
    known = {one["type"]: one for one in stored.get("conditions") or ()}
    for one in said:
        if one.type not in _WELL or one.status is Truth.UNKNOWN:
            continue
        well, word = _WELL[one.type]
        before = known.get(one.type, {})
        was = before.get("status")
        turned = was != one.status.value
        if one.status is well:
            # A new service becomes ready, and has recovered from nothing.
            if turned and (one.type == READY or was not in {None, Truth.UNKNOWN.value}):
                yield Emit(warning=False, reason=word, message=one.message or word)
        elif one.type == READY:
            if was == Truth.TRUE.value:
                yield Emit(warning=True, reason=one.reason, message=one.message)
        elif turned or before.get("reason") != one.reason:
            yield Emit(warning=True, reason=one.reason, message=one.message)


def of_revisions(stored: Mapping[str, Any], *, update: str, current: str | None) -> Iterator[Emit]:
    """A new revision that comes in, or has come in.

    Args:
        stored: the status as it stood.
        update: the revision that is asked for.
        current: the revision that serves.
    """
    serving = stored.get("currentRevision")
    if serving and update != serving and stored.get("updateRevision") != update:
        yield Emit(warning=False, reason="RollingOut", message=f"{serving} is replaced by {update}")
    if serving and current == update != serving:
        yield Emit(warning=False, reason="RolledOut", message=f"{update} has replaced {serving}")


def of_changes(changes: Sequence[Change]) -> Iterator[Emit]:
    """What the control laws put in force, or would."""
    for one in changes:
        reason = _KNOBS[one.knob] if one.applied else "Recommended"
        yield Emit(warning=False, reason=reason, message=f"{one.message} ({one.reason})")


def of_silence(silent: Iterable[Silence]) -> Iterator[Emit]:
    """Pods that are ready and told no numbers."""
    for one in silent:
        message = f"{one.role} {one.pod}: {one.detail}"
        yield Emit(warning=True, reason=silence_reason(one.signal), message=message)


def of_refusals(failures: Mapping[tuple[str, str], str]) -> Iterator[Emit]:
    """Engines that did not take their limits."""
    for (kind, name), words in sorted(failures.items()):
        if kind == "Pod":
            yield Emit(warning=True, reason="LimitsNotTaken", message=f"pod {name}: {words}")
