"""Latency targets, and the SLO classes of a manifest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from goodput_core.declaration import Cel, dns_label_field, spec_field
from goodput_core.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "MAX_PRIORITY",
    "USUAL_CONFIDENCE",
    "SLOClass",
    "Targets",
    "format_objective",
    "margin_field",
    "parse_confidence",
    "parse_margin",
    "parse_objective",
    "percentage_field",
]

USUAL_CONFIDENCE: Final = Fraction(95, 100)
"""One-sided confidence of a verdict, unless the user states another."""
MAX_PRIORITY: Final = 2**31 - 1
"""Largest priority of a request or class; the smallest of a class is its negative."""
_MAX_WEIGHT: Final = 1_000_000
_PERCENTAGE: Final = r"^(100|[0-9]{1,2})(\.[0-9]{1,6})?%$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Upper bounds of one request's latencies; None for each latency without a target.

    Args:
        ttft_ns: time to first token, from the scheduled arrival.
        tpot_ns: mean time per output token after the first.
        tbt_p99_ns: nearest-rank p99 of the request's own gaps between tokens.
        e2e_ns: time to the end of the response, from the scheduled arrival.
    """

    ttft_ns: int | None = None
    tpot_ns: int | None = None
    tbt_p99_ns: int | None = None
    e2e_ns: int | None = None

    @property
    def empty(self) -> bool:
        """True if there is no target."""
        return (
            self.ttft_ns is None
            and self.tpot_ns is None
            and self.tbt_p99_ns is None
            and self.e2e_ns is None
        )

    @property
    def first_token_ns(self) -> int | None:
        """Time from arrival within which the first token is due; None if there is no such target.

        A response cannot end before its first token, so an E2E target bounds this time too.
        """
        ttft_ns, e2e_ns = self.ttft_ns, self.e2e_ns
        if ttft_ns is None or (e2e_ns is not None and e2e_ns < ttft_ns):
            return e2e_ns
        return ttft_ns

    @property
    def pace_ns(self) -> int | None:
        """Longest step that meets both the TPOT and the TBT target; None if there is neither."""
        tpot_ns, tbt_ns = self.tpot_ns, self.tbt_p99_ns
        if tpot_ns is None or (tbt_ns is not None and tbt_ns < tpot_ns):
            return tbt_ns
        return tpot_ns

    def overridden_by(self, row: Targets) -> Targets:
        """Return these targets, each replaced by the target of the row if the row has one."""
        if row.empty:
            return self
        return Targets(
            ttft_ns=self.ttft_ns if row.ttft_ns is None else row.ttft_ns,
            tpot_ns=self.tpot_ns if row.tpot_ns is None else row.tpot_ns,
            tbt_p99_ns=self.tbt_p99_ns if row.tbt_p99_ns is None else row.tbt_p99_ns,
            e2e_ns=self.e2e_ns if row.e2e_ns is None else row.e2e_ns,
        )


def parse_objective(text: str) -> Fraction:
    """Return the exact fraction of a percentage such as `99%` or `99.95%`.

    Raises:
        ValueError: the text is not a percentage above 0 % and below 100 %. No number of requests
            can show an objective of 100 %.
    """
    objective = _parse_percentage(text)
    if not 0 < objective < 1:
        raise ValueError(f"{text!r} is out of bounds; an objective lies above 0% and below 100%")
    return objective


def _parse_percentage(text: str) -> Fraction:
    digits = text.removeprefix("-")
    if not re.fullmatch(_PERCENTAGE, digits):
        raise ValueError(f"{text!r} is not a percentage; write for example '99%' or '99.9%'")
    share = Fraction(digits[:-1]) / 100
    return share if digits == text else -share


def parse_confidence(text: str) -> Fraction:
    """Return the exact fraction of a one-sided confidence such as `95%`.

    Raises:
        ValueError: the text is not a percentage of at least 50 % and below 100 %.
    """
    confidence = _parse_percentage(text)
    if not Fraction(1, 2) <= confidence < 1:
        raise ValueError(f"{text!r} is out of bounds; a confidence is at least 50% and below 100%")
    return confidence


def parse_margin(text: str) -> Fraction:
    """Return a margin as an exact share; 0 % is allowed.

    Raises:
        ValueError: the text is not a percentage from 0 % to below 100 %.
    """
    margin = _parse_percentage(text)
    if not 0 <= margin < 1:
        raise ValueError(f"{text!r} is out of bounds; a margin is at least 0% and below 100%")
    return margin


def format_objective(objective: Fraction) -> str:
    """Return a percentage from which `parse_objective` returns the same fraction."""
    percent = objective * 100
    rounded = round(Decimal(percent.numerator) / percent.denominator, 6)
    return f"{rounded.normalize():f}%"


def percentage_field(doc: str, *, example: str) -> Any:
    """Declare an optional share above 0% and below 100%, decoded to an exact fraction."""
    cel = Cel(
        rule="!self.startsWith('100') && self.matches('[1-9]')",
        message="must lie above 0% and below 100%",
    )
    return _share_field(doc, example=example, parse=parse_objective, cel=cel)


def margin_field(doc: str, *, example: str) -> Any:
    """Declare an optional share from 0% to below 100%, decoded to an exact fraction."""
    cel = Cel(rule="!self.startsWith('100')", message="must be at least 0% and below 100%")
    return _share_field(doc, example=example, parse=parse_margin, cel=cel)


def _share_field(doc: str, *, example: str, parse: Callable[[str], Fraction], cel: Cel) -> Any:
    return spec_field(
        doc,
        default=None,
        max_length=11,
        pattern=_PERCENTAGE,
        pattern_hint=f"be a percentage such as {example}",
        parse=parse,
        cel=cel,
    )


def _milliseconds_field(doc: str, **more: Any) -> Any:
    return spec_field(f"{doc}, milliseconds.", minimum=1, maximum=86_400_000, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOClass:
    """One class of traffic and its latency targets."""

    name: str = dns_label_field("The class's name.")
    ttft_ms: int = _milliseconds_field("Target of the time to first token")
    tpot_ms: int = _milliseconds_field("Target of the time per output token")
    tbt_p99_ms: int | None = _milliseconds_field(
        "Target of the p99 of the gaps between a request's tokens", default=None
    )
    e2e_ms: int | None = _milliseconds_field(
        "Target of the time to the end of the response", default=None
    )
    objective: Fraction | None = percentage_field(
        "Share of requests that must meet their targets, such as '99%'; without it the class is "
        "reported but gets no verdict.",
        example="'99%' or '99.9%'",
    )
    priority: int = spec_field(
        "Level of importance of requests that have no X-Priority of their own. Levels are strict: "
        "a more important request comes before any number of less important ones.",
        default=0,
        minimum=-MAX_PRIORITY,
        maximum=MAX_PRIORITY,
    )
    weight: int = spec_field(
        "Value of a request that meets its targets, relative to the other classes of the same "
        "priority. Weights of 5 and 2 make one request worth 2.5 others.",
        default=1,
        minimum=1,
        maximum=_MAX_WEIGHT,
    )

    @property
    def targets(self) -> Targets:
        """The targets in nanoseconds."""
        return Targets(
            ttft_ns=self.ttft_ms * NS_PER_MS,
            tpot_ns=self.tpot_ms * NS_PER_MS,
            tbt_p99_ns=None if self.tbt_p99_ms is None else self.tbt_p99_ms * NS_PER_MS,
            e2e_ns=None if self.e2e_ms is None else self.e2e_ms * NS_PER_MS,
        )
