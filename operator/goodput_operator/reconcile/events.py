"""What of a round is worth an Event: conditions that turned, revisions, and decisions.

`kubectl describe` tells the story of a service by these, so each says something that was not so
before.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from goodput_core.spec.status import Truth
from goodput_operator.control.words import Change, Knob
from goodput_operator.reconcile.actions import Emit
from goodput_operator.reconcile.attainment import silence_reason
from goodput_operator.reconcile.conditions import (
    READY,
    SCALING_LIMITED,
    SLO_ATTAINED,
    STALLED,
    SUSPENDED,
    Said,
)
from goodput_operator.reconcile.memory import Told

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from goodput_operator.control.decided import Decided
    from goodput_operator.control.measures import Measures, Silence
    from goodput_operator.control.rounds import ControlRound

__all__ = [
    "of_changes",
    "of_conditions",
    "of_refusals",
    "of_revisions",
    "of_silence",
    "told_after",
]

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
                wished = one.reason == SUSPENDED
                yield Emit(warning=not wished, reason=one.reason, message=one.message)
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


def of_silence(silent: Iterable[Silence], told: Collection[tuple[str, str]]) -> Iterator[Emit]:
    """Pods that are ready and tell no numbers: one Event for all that have just fallen silent.

    Args:
        silent: those that are.
        told: (pod, reason) of those that an Event has named already.
    """
    new: dict[tuple[str, str], list[Silence]] = defaultdict(list)
    for one in silent:
        reason = silence_reason(one.signal)
        if (one.pod, reason) not in told:
            new[one.role, reason].append(one)
    for (role, reason), those in new.items():
        message = f"{role} {those[0].pod}: {those[0].detail}"
        yield Emit(warning=True, reason=reason, message=message + _others(those[1:]))


def of_refusals(failures: Mapping[tuple[str, str], str], told: Collection[str]) -> Iterator[Emit]:
    """Engines that do not take their limits: one Event for all that have just begun to.

    Args:
        failures: of the last round.
        told: pods that an Event has named already.
    """
    new = [key for key in sorted(failures) if key[0] == "Pod" and key[1] not in told]
    if new:
        message = f"pod {new[0][1]}: {failures[new[0]]}"
        yield Emit(warning=True, reason="LimitsNotTaken", message=message + _others(new[1:]))


def told_after(
    told: Told,
    measures: Measures | None,
    law: ControlRound | None,
    failures: Mapping[tuple[str, str], str],
    decided: Decided,
) -> Told:
    """What has been told after a round, and is still as it was told.

    Args:
        told: before it.
        measures: of the round; None: none, and all are silent that were.
        law: what it came to; it pushes again to those that have not taken their limits.
        failures: of the last round.
        decided: what stood before the round, as far as it was told.
    """
    refusing = {name for kind, name in failures if kind == "Pod"}
    kept = told.refusing if law is None else told.refusing & {one.name for one in law.pushes}
    silent = told.silent
    if measures is not None:
        silent = frozenset((one.pod, silence_reason(one.signal)) for one in measures.silent)
    return Told(
        silent=silent,
        refusing=kept | refusing,
        decided=decided if law is None else law.decided,
    )


def _others(those: Sequence[object]) -> str:
    return f"; and {len(those)} more" if those else ""
