"""Show the comparison of a synthetic trace with its source, as a table or JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.table import Table
from rich.text import Text

from goodput_core.text import printable
from goodput_core.units import NS_PER_S, format_duration, format_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from goodput_traces.synthesis.likeness import Feature

__all__ = ["comparison_to_json", "print_comparison"]

_CORRELATION: Final = "lengths.rank_correlation"
_LABELS: Final = {
    "arrivals.rate_per_s": "requests a second",
    "arrivals.peak_minute_per_s": "requests a second, peak minute",
    "arrivals.gap_cv": "CV of gaps",
    "arrivals.tied_share": "requests in ties",
    _CORRELATION: "rank correlation of prompt and output",
    "prefixes.reused": "blocks seen before",
    "prefixes.reused_within_1m": "blocks seen in the last minute",
    "sessions.share_of_requests": "requests in sessions",
    "sessions.turns_mean": "turns of a session, mean",
    "sessions.turns_p90": "turns of a session, p90",
    "sessions.gap_p50_s": "time between turns, p50",
    "sessions.gap_p90_s": "time between turns, p90",
}
_SHARES: Final = ("share", "reused", "reused_within_1m", "tied_share", "share_of_requests")
_LARGE_DIFFERENCE: Final = 0.1
_NEARLY_ZERO: Final = 1e-4


def comparison_to_json(features: Sequence[Feature]) -> dict[str, Any]:
    """Return the values of both traces by the name of the feature; times are in seconds."""
    return {
        one.name: {"source": one.source, "expected": one.expected, "result": one.result}
        for one in features
    }


def print_comparison(console: Console, features: Sequence[Feature]) -> None:
    """Print a table of the features, and a sentence about those that differ most."""
    is_scaled = any(one.expected != one.source for one in features)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    for title in ("source", *(["at this rate"] if is_scaled else []), "result", "difference"):
        table.add_column(title, justify="right", no_wrap=True)
    large = []
    for feature in features:
        label = printable(_label(feature.name))
        difference, shown = _difference(feature), "–"
        if difference is not None:
            in_percent = _is_relative(feature)
            shown = f"{difference:+.1%}" if in_percent else _format_change(difference)
            if abs(difference) > _LARGE_DIFFERENCE:
                large.append(f"{label} ({f'{difference:+.0%}' if in_percent else shown})")
        values = [feature.source, *([feature.expected] if is_scaled else []), feature.result]
        table.add_row(
            Text(label),
            *(_format(feature.name, value) for value in values),
            shown,
        )
    console.print(table)
    if large:
        limit = f"{_LARGE_DIFFERENCE:.0%} or {_LARGE_DIFFERENCE:g}"
        console.print(Text(f"\ndifferences above {limit}: {', '.join(large)}"))


def _difference(feature: Feature) -> float | None:
    """Return the difference as a share of the expected value, or in the unit of the feature."""
    if feature.expected is None or feature.result is None:
        return None
    difference = feature.result - feature.expected
    return difference / feature.expected if _is_relative(feature) else difference


def _is_relative(feature: Feature) -> bool:
    """True unless a share of the expected value has no meaning, because it is 0 or nearly 0."""
    if feature.name == _CORRELATION:
        return False
    return feature.expected is not None and abs(feature.expected) >= _NEARLY_ZERO


def _format_change(change: float) -> str:
    return "0" if abs(change) < _NEARLY_ZERO else f"{change:+.2g}"


def _label(name: str) -> str:
    if name in _LABELS:
        return _LABELS[name]
    group, _, rest = name.partition(".")
    if group == "class":
        slo_class, _, number = rest.rpartition(".")
        return f"class {slo_class}, {number.replace('_', ' tokens, ')}"
    if rest.startswith("dispersion_"):
        return f"index of dispersion, {rest.removeprefix('dispersion_').removesuffix('s')} s"
    return f"{group.replace('_', ' ')}, {rest}"


def _format(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    number = name.rpartition(".")[2]
    if number in _SHARES:
        return f"{value:.1%}"
    if number.startswith("gap_p"):
        return format_duration(round(value * NS_PER_S))
    return f"{value:,.0f}" if value >= 100 else format_number(value)
