"""`spec.slo`: what was promised, by class of traffic."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Final

from goodput_core.slo.targets import OBJECTIVE_PATTERN, SLOClass, parse_objective
from goodput_core.spec.fields import DNS_HINT, DNS_LABEL, Between, Cel, spec_field

__all__ = ["WITHIN_PERCENT", "SLOClassSpec", "SLOSpec"]

_MAX_MS: Final = 86_400_000
# The bounds of `parse_objective`.
WITHIN_PERCENT: Final = Cel(
    rule="!self.startsWith('100') && self.matches('[1-9]')",
    message="must lie above 0% and below 100%",
)


def _default_is_no_class(slo: SLOSpec) -> str | None:
    names = [c.name for c in slo.classes]
    if slo.default is None or slo.default in names:
        return None
    return f"{slo.default!r} is not a class; classes: {', '.join(names)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOClassSpec:
    """One class of traffic and its promise."""

    name: str = spec_field(
        "The class's name.", max_length=40, pattern=DNS_LABEL, pattern_hint=DNS_HINT
    )
    ttft_ms: int = spec_field(
        "Promised time to first token, milliseconds.", minimum=1, maximum=_MAX_MS
    )
    tpot_ms: int = spec_field(
        "Promised time per output token, milliseconds.", minimum=1, maximum=_MAX_MS
    )
    tbt_p99_ms: int | None = spec_field(
        "Promised p99 of the gaps between a request's tokens, milliseconds.",
        default=None,
        minimum=1,
        maximum=_MAX_MS,
    )
    e2e_ms: int | None = spec_field(
        "Promised time for the whole request, milliseconds.",
        default=None,
        minimum=1,
        maximum=_MAX_MS,
    )
    objective: Fraction | None = spec_field(
        "Share of requests that must attain, such as '99%'; without it the class is reported only.",
        default=None,
        max_length=11,
        pattern=OBJECTIVE_PATTERN,
        pattern_hint="be a percentage such as '99%' or '99.9%'",
        parse=parse_objective,
        cel=WITHIN_PERCENT,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOSpec:
    """What was promised, by class of traffic."""

    BETWEEN: ClassVar[tuple[Between, ...]] = (
        Between(
            field="default",
            cel=Cel(
                rule="!has(self.default) || self.classes.exists(c, c.name == self.default)",
                message="must be the name of a class",
            ),
            problem=_default_is_no_class,
        ),
    )

    classes: tuple[SLOClassSpec, ...] = spec_field(
        "Classes of traffic.", min_items=1, max_items=16, key="name"
    )
    default: str | None = spec_field(
        "Class of a request that names none; the first class when absent.",
        default=None,
        max_length=40,
    )

    outage_seconds: int | None = spec_field(
        "Longest outage that a PASS must exclude, seconds; only what a window shows when absent.",
        default=None,
        minimum=1,
        maximum=86_400,
    )

    @property
    def default_class(self) -> str:
        """The class of a request that names none."""
        return self.default if self.default is not None else self.classes[0].name

    def by_name(self) -> dict[str, SLOClass]:
        """The promises, by class name, in the manifest's order."""
        return {
            c.name: SLOClass(
                name=c.name,
                ttft_ms=c.ttft_ms,
                tpot_ms=c.tpot_ms,
                tbt_p99_ms=c.tbt_p99_ms,
                e2e_ms=c.e2e_ms,
                objective=c.objective,
            )
            for c in self.classes
        }
